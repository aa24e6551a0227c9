/*
 * settings.h
 *	  The settings (GUCs) of dq_bridge.
 */
#ifndef DQ_SETTINGS_H
#define DQ_SETTINGS_H

extern bool dq_enabled;			/* dq_bridge.enabled, SIGHUP */
extern int	dq_log_level;		/* dq_bridge.log_level: elevel for routine messages */
extern int	dq_node_id;			/* dq_bridge.node_id, -1: auto */
extern char *dq_script_dir;		/* dq_bridge.script_dir, superuser */

extern void dq_settings_init(void);

#endif							/* DQ_SETTINGS_H */
