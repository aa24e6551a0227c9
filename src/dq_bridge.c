/*
 * dq_bridge.c
 *	  The library's entry point: settings, shared memory, and the launcher when
 *	  it is loaded by shared_preload_libraries.
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "compat.h"
#include "settings.h"
#include "shared/shared.h"

DQ_MODULE_MAGIC("dq_bridge", "0.1.0");

extern PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	dq_settings_init();
	dq_shared_init();

	/* pg_upgrade must meet no connection but its own */
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		dq_register_static_launcher();
}
