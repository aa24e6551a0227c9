/*
 * points.c
 *	  What a named point does when a test has armed it. Used by t/040_points.pl
 *	  with a library of its own; empty in any other build.
 *
 *	  The directory is the setting dq_bridge.points_dir. The first process that
 *	  comes to point x and finds the file x.wait takes it (renames it to x.reached
 *	  and writes its process id into it) and waits until x.reached is gone. So one
 *	  process waits at each arming, whoever else comes by, and a process that is
 *	  killed while it waits stops no other.
 */
#include "postgres.h"

#include "shared/points.h"

#ifdef DQ_POINTS

#include <fcntl.h>
#include <unistd.h>

#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/wait_event.h"

#define LOOK_MS		2

static char *points_dir = NULL;

void
dq_points_init(void)
{
	DefineCustomStringVariable("dq_bridge.points_dir",
							   "Directory where tests arm the points of the library.",
							   NULL,
							   &points_dir,
							   "",
							   PGC_SIGHUP,
							   GUC_NOT_IN_SAMPLE,
							   NULL, NULL, NULL);
}

/*
 * Interrupts are acted upon, where the caller allows them: a cancel or the end
 * of the process comes at this very point.
 */
void
dq_point(const char *name)
{
	char		armed[MAXPGPATH],
				taken[MAXPGPATH],
				reached[MAXPGPATH],
				pid[32];
	bool		owed = false;
	int			fd;
	int			len;

	if (points_dir == NULL || points_dir[0] == '\0')
		return;
	snprintf(armed, MAXPGPATH, "%s/%s.wait", points_dir, name);
	snprintf(taken, MAXPGPATH, "%s/%s.%d", points_dir, name, MyProcPid);
	snprintf(reached, MAXPGPATH, "%s/%s.reached", points_dir, name);
	if (rename(armed, taken) != 0)
		return;

	fd = open(taken, O_WRONLY | O_TRUNC);
	len = snprintf(pid, sizeof(pid), "%d\n", MyProcPid);
	if (fd < 0 || write(fd, pid, len) != len || close(fd) != 0 ||
		rename(taken, reached) != 0)
		ereport(PANIC,
				(errcode_for_file_access(),
				 errmsg("could not write \"%s\": %m", reached)));

	while (access(reached, F_OK) == 0)
	{
		if (WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					  LOOK_MS, PG_WAIT_EXTENSION) & WL_LATCH_SET)
		{
			ResetLatch(MyLatch);
			owed = true;
		}
		CHECK_FOR_INTERRUPTS();
	}
	/* it may have been set for the caller */
	if (owed)
		SetLatch(MyLatch);
}

#endif							/* DQ_POINTS */
