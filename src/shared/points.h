/*
 * points.h
 *	  Named points at which a test makes a process wait, to kill or cut something
 *	  just there. They exist only in a library built by `make POINTS=1`; in any
 *	  other DQ_POINT is nothing.
 */
#ifndef DQ_POINTS_H
#define DQ_POINTS_H

#ifdef DQ_POINTS

extern void dq_points_init(void);	/* from dq_settings_init */
extern void dq_point(const char *name);

#define DQ_POINT(name) dq_point(name)

#else

#define DQ_POINT(name) ((void) 0)

#endif

#endif							/* DQ_POINTS_H */
