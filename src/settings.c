/*
 * settings.c
 *	  The settings (GUCs) of dq_bridge. Called once, from _PG_init().
 */
#include "postgres.h"

#include "redis/redis.h"
#include "settings.h"
#include "shared/points.h"
#include "utils/guc.h"

bool		dq_enabled = true;
int			dq_log_level = LOG;
int			dq_node_id = -1;
char	   *dq_script_dir = NULL;

/*
 * Those of log_min_messages at which a message can be given without ending what is
 * being done: never ERROR and above.
 */
static const struct config_enum_entry log_levels[] = {
	{"debug5", DEBUG5, false},
	{"debug4", DEBUG4, false},
	{"debug3", DEBUG3, false},
	{"debug2", DEBUG2, false},
	{"debug1", DEBUG1, false},
	{"debug", DEBUG2, true},
	{"info", INFO, false},
	{"notice", NOTICE, false},
	{"warning", WARNING, false},
	{"log", LOG, false},
	{NULL, 0, false}
};

static bool
check_script_dir(char **newval, void **extra, GucSource source)
{
	char	   *detail = NULL;

	if (dq_scripts_check_dir(*newval, &detail))
		return true;
	GUC_check_errdetail("%s", detail);
	GUC_check_errhint("A script that the directory does not contain is taken from the library.");
	return false;
}

static void
assign_script_dir(const char *newval, void *extra)
{
	dq_scripts_use_dir(newval);
}

void
dq_settings_init(void)
{
	DefineCustomBoolVariable("dq_bridge.enabled",
							 "Runs the workers that hand tasks to Redis.",
							 "When off, all workers of dq_bridge stop; offers are still recorded.",
							 &dq_enabled,
							 true,
							 PGC_SIGHUP,
							 0,
							 NULL, NULL, NULL);

	DefineCustomEnumVariable("dq_bridge.log_level",
							 "Level of the routine messages of dq_bridge.",
							 "Such as a worker that starts, or that has reached its Redis server again.",
							 &dq_log_level,
							 LOG,
							 log_levels,
							 PGC_SUSET,
							 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("dq_bridge.node_id",
							"Node number in the ids of tasks offered by this server.",
							"-1 chooses one for each database.",
							&dq_node_id,
							-1, -1, 32767,
							PGC_SIGHUP,
							0,
							NULL, NULL, NULL);

	DefineCustomStringVariable("dq_bridge.script_dir",
							   "Directory with Lua scripts that replace those of the library.",
							   NULL,
							   &dq_script_dir,
							   "",
							   PGC_SUSET,
							   GUC_SUPERUSER_ONLY,
							   check_script_dir, assign_script_dir, NULL);

#ifdef DQ_POINTS
	dq_points_init();
#endif
	MarkGUCPrefixReserved("dq_bridge");
}
