/*
 * slots.c
 *	  The worker slots: who is there, who is wanted, and what each process tells
 *	  about itself. Called by the workers; the launcher reads the slots itself.
 *
 *	  A slot of a bridge outlives its process: it is what makes the launcher
 *	  start the next one, and it keeps the last error for dq_workers.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "shared/shared.h"
#include "shared/shared_private.h"

static DqWorkerSlot *my_slot = NULL;

/* what the exit callback does with the slot */
static bool exit_forget = false;
static const char *exit_state = NULL;	/* a literal */
static int	exit_respawn_ms = -1;

/* Copy a text into a field, cut between characters. */
static void
set_text(char *field, size_t size, const char *text)
{
	int			len = pg_mbcliplen(text, strlen(text), size - 1);

	memcpy(field, text, len);
	field[len] = '\0';
}

static void
set_state(DqWorkerSlot *slot, const char *state)
{
	if (strcmp(slot->state, state) != 0)
	{
		strlcpy(slot->state, state, sizeof(slot->state));
		slot->since = GetCurrentTimestamp();
	}
}

static void
free_slot(DqWorkerSlot *slot)
{
	memset(slot, 0, sizeof(*slot));
	slot->procno = -1;
}

/*
 * Runs before the shared memory segments are detached, and while locks can
 * still be taken. The slot may have gone to another process meanwhile only if
 * this one gave it away; the pid tells.
 */
static void
release_slot(int code, Datum arg)
{
	DqShared   *s = dq_shared_if_attached();
	DqWorkerSlot *slot = my_slot;

	if (s == NULL || slot == NULL)
		return;
	my_slot = NULL;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	if (slot->in_use && slot->pid == MyProcPid)
	{
		if (exit_forget || slot->role == DQ_ROLE_LAUNCHER)
			free_slot(slot);
		else
		{
			slot->pid = 0;
			slot->procno = -1;
			set_state(slot, exit_state ? exit_state : "down");
			if (exit_respawn_ms >= 0)
				slot->not_before =
					TimestampTzPlusMilliseconds(GetCurrentTimestamp(), exit_respawn_ms);
		}
	}
	LWLockRelease(&s->lock);

	/* a launcher that did not start this process is not notified of its end */
	dq_wake_launcher();
}

static DqWorkerSlot *
find_slot(DqShared *s, DqRole role, Oid dboid, Oid serverid)
{
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (slot->in_use && slot->role == role && slot->dboid == dboid &&
			slot->serverid == serverid)
			return slot;
	}
	return NULL;
}

static DqWorkerSlot *
new_slot(DqShared *s, DqRole role, Oid dboid, Oid serverid)
{
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (!slot->in_use)
		{
			free_slot(slot);
			slot->in_use = true;
			slot->role = role;
			slot->dboid = dboid;
			slot->serverid = serverid;
			return slot;
		}
	}
	return NULL;
}

DqWorkerSlot *
dq_worker_claim(DqRole role, Oid dboid, Oid serverid)
{
	static bool registered = false;
	DqShared   *s = dq_shared();
	DqWorkerSlot *slot;

	if (!registered)
	{
		before_shmem_exit(release_slot, (Datum) 0);
		registered = true;
	}

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	slot = find_slot(s, role, dboid, serverid);
	if (slot != NULL && slot->pid != 0 && slot->pid != MyProcPid)
		slot = NULL;
	else
	{
		if (slot == NULL)
			slot = new_slot(s, role, dboid, serverid);
		if (slot != NULL)
		{
			if (my_slot != NULL && my_slot != slot)
				free_slot(my_slot);
			slot->pid = MyProcPid;
			slot->procno = DqMyProcNumber;
			set_state(slot, "starting");
			my_slot = slot;
		}
	}
	LWLockRelease(&s->lock);
	return slot;
}

DqWorkerSlot *
dq_worker_mine(void)
{
	return my_slot;
}

void
dq_worker_state(const char *state)
{
	/* only this process writes it: an unchanged state needs no lock */
	if (my_slot == NULL || strcmp(my_slot->state, state) == 0)
		return;
	LWLockAcquire(&dq_shared()->lock, LW_EXCLUSIVE);
	set_state(my_slot, state);
	LWLockRelease(&dq_shared()->lock);
}

void
dq_worker_error(const char *message)
{
	if (my_slot == NULL)
		return;
	LWLockAcquire(&dq_shared()->lock, LW_EXCLUSIVE);
	set_text(my_slot->last_error, sizeof(my_slot->last_error), message);
	my_slot->last_error_at = GetCurrentTimestamp();
	LWLockRelease(&dq_shared()->lock);
}

void
dq_worker_warnings(const char *newline_separated)
{
	if (my_slot == NULL || strcmp(my_slot->warnings, newline_separated) == 0)
		return;
	LWLockAcquire(&dq_shared()->lock, LW_EXCLUSIVE);
	set_text(my_slot->warnings, sizeof(my_slot->warnings), newline_separated);
	LWLockRelease(&dq_shared()->lock);
}

void
dq_worker_reconnected(void)
{
	if (my_slot == NULL)
		return;
	LWLockAcquire(&dq_shared()->lock, LW_EXCLUSIVE);
	my_slot->reconnects++;
	LWLockRelease(&dq_shared()->lock);
}

void
dq_worker_leaving(const char *state, int respawn_ms)
{
	exit_state = state;
	exit_respawn_ms = respawn_ms;
}

void
dq_worker_forget(void)
{
	exit_forget = true;
}

void
dq_worker_thrives(void)
{
	if (my_slot == NULL || (my_slot->failures == 0 && my_slot->not_before == 0))
		return;
	LWLockAcquire(&dq_shared()->lock, LW_EXCLUSIVE);
	my_slot->failures = 0;
	my_slot->not_before = 0;
	LWLockRelease(&dq_shared()->lock);
}

/*
 * New slots only: where one exists, the launcher knows. When there is no room
 * the next look tries again; the launcher says so.
 */
bool
dq_worker_want(DqRole role, Oid dboid, Oid serverid, const char *name)
{
	DqShared   *s = dq_shared();
	DqWorkerSlot *slot;
	bool		made = false;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	slot = find_slot(s, role, dboid, serverid);
	if (slot == NULL)
	{
		slot = new_slot(s, role, dboid, serverid);
		if (slot != NULL)
		{
			set_state(slot, "wanted");
			made = true;
		}
	}
	if (slot != NULL)
		strlcpy(slot->server, name, sizeof(slot->server));
	else
		s->overflow = true;
	LWLockRelease(&s->lock);
	return made;
}

void
dq_worker_unwant(DqRole role, Oid dboid, Oid serverid)
{
	DqShared   *s = dq_shared();
	DqWorkerSlot *slot;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	slot = find_slot(s, role, dboid, serverid);
	if (slot != NULL && slot->pid == 0)
		free_slot(slot);
	LWLockRelease(&s->lock);
}

uint32
dq_database_pokes(Oid dboid)
{
	DqShared   *s = dq_shared();
	DqDatabase *db;
	uint32		pokes;

	LWLockAcquire(&s->lock, LW_SHARED);
	db = dq_database_entry(dboid, false);
	pokes = db ? db->pokes : 0;
	LWLockRelease(&s->lock);
	return pokes;
}

/*
 * A poke that came while the look was on asks for another one: the look may
 * have been too early to see what it was about.
 */
void
dq_database_looked(Oid dboid, uint32 pokes, bool here)
{
	DqShared   *s = dq_shared();
	DqDatabase *db;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	db = dq_database_entry(dboid, here);
	if (db != NULL)
	{
		db->here = here;
		db->looked = pokes;
		db->looked_at = GetCurrentTimestamp();
		db->failures = 0;
		/* commits without a bridge poke: no more than a few looks a second */
		db->not_before = TimestampTzPlusMilliseconds(db->looked_at, 300);
	}
	LWLockRelease(&s->lock);
}

bool
dq_database_stopped(Oid dboid)
{
	DqShared   *s = dq_shared();
	DqDatabase *db;
	bool		stopped;

	LWLockAcquire(&s->lock, LW_SHARED);
	db = dq_database_entry(dboid, false);
	stopped = db != NULL && db->stopped;
	LWLockRelease(&s->lock);
	return stopped;
}

DqDatabase *
dq_database_entry(Oid dboid, bool make)
{
	DqShared   *s = dq_shared_if_attached();
	DqDatabase *unused = NULL;

	if (s == NULL)
		return NULL;
	for (int i = 0; i < DQ_MAX_DATABASES; i++)
	{
		DqDatabase *db = &s->databases[i];

		if (db->dboid == dboid)
			return db;
		if (unused == NULL && !OidIsValid(db->dboid))
			unused = db;
	}
	if (!make || unused == NULL)
		return NULL;
	memset(unused, 0, sizeof(*unused));
	unused->dboid = dboid;
	return unused;
}
