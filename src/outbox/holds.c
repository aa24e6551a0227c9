/*
 * holds.c
 *	  The holds of the current transaction in Redis: which tokens stand for rows
 *	  that it has written, and which are left over (their savepoint was rolled back,
 *	  or the answer to their script never came) and may be taken over by a later
 *	  call. At the end of the transaction the bridge is told when something has to
 *	  be put back. Called by the SQL functions and by xact.c.
 */
#include "postgres.h"

#include "outbox/outbox.h"
#include "outbox/outbox_private.h"
#include "shared/shared.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

typedef struct OwnHold
{
	char		token[DQ_TOKEN_LEN];
	int			level;			/* transaction nesting level it belongs to */
} OwnHold;

/* In order of level, so that the end of a savepoint looks at the last only. */
static OwnHold *live = NULL;
static int	nlive = 0,
			maxlive = 0;
/* Tokens under which a hold may stand that no row is written for. */
static HTAB *left = NULL;
static bool registered = false;
static int32 writing = 0;		/* shard of a row that is being written, 0: none */

/* The server's life, up to its next crash: xids may be given out again then. */
uint64
dq_incarnation(void)
{
	return dq_shared()->incarnation;
}

void
dq_hold_draw(char *token)
{
	if (!pg_strong_random(token, DQ_TOKEN_LEN))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random token")));
}

/* From here on the hold may exist, whether an answer comes or not (PO 8). */
void
dq_hold_sent(const char *token)
{
	dq_xact_register();
	registered = true;
	if (left == NULL)
	{
		HASHCTL		ctl = {0};

		ctl.keysize = ctl.entrysize = DQ_TOKEN_LEN;
		ctl.hcxt = TopTransactionContext;
		left = hash_create("dq_bridge holds without a row", 64, &ctl,
						   HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	}
	(void) hash_search(left, token, HASH_ENTER, NULL);
}

static bool
drop_left(const char *token)
{
	return left && hash_search(left, token, HASH_REMOVE, NULL) != NULL;
}

bool
dq_hold_is_left(const char *token)
{
	return left && hash_search(left, token, HASH_FIND, NULL) != NULL;
}

/* No hold stands under it: Redis has answered so. */
void
dq_hold_void(const char *token)
{
	(void) drop_left(token);
}

/* The row with this token is written; its fate is the hold's. */
void
dq_hold_keep(const char *token)
{
	if (!drop_left(token))
		return;
	if (nlive == maxlive)
	{
		int			more = Max(2 * maxlive, 16);

		live = live ? repalloc_huge(live, (Size) more * sizeof(OwnHold))
			: MemoryContextAlloc(TopTransactionContext, more * sizeof(OwnHold));
		maxlive = more;
	}
	memcpy(live[nlive].token, token, DQ_TOKEN_LEN);
	live[nlive].level = GetCurrentTransactionNestLevel();
	nlive++;
}

/*
 * Around the row that relies on a hold; false: do not write it, ask anew.
 */
bool
dq_hold_writing(int32 shard, const DqSession *session)
{
	if (!dq_session_writing(MyDatabaseId, shard, session->session, session->epoch))
		return false;
	writing = shard;
	return true;
}

void
dq_hold_written(void)
{
	if (writing != 0)
		dq_session_written(MyDatabaseId, writing);
	writing = 0;
}

char *
dq_holds_left(int *n)
{
	HASH_SEQ_STATUS status;
	char	   *tokens,
			   *token;

	*n = left ? hash_get_num_entries(left) : 0;
	if (*n == 0)
		return NULL;
	tokens = palloc(*n * DQ_TOKEN_LEN);
	*n = 0;
	hash_seq_init(&status, left);
	while ((token = hash_seq_search(&status)) != NULL)
		memcpy(tokens + (*n)++ * DQ_TOKEN_LEN, token, DQ_TOKEN_LEN);
	return tokens;
}

/* ---- ends, from xact.c ---- */

/* true: something may have to be put back */
bool
dq_holds_end(bool committed)
{
	bool		back = registered &&
		((left && hash_get_num_entries(left) > 0) || (!committed && nlive > 0));

	dq_hold_written();			/* an error came between */
	live = NULL;
	left = NULL;
	nlive = maxlive = 0;
	registered = false;
	return back;
}

bool
dq_holds_subend(bool committed)
{
	int			level = GetCurrentTransactionNestLevel();
	/* a statement that failed may have left some as well */
	bool		back = !committed && left && hash_get_num_entries(left) > 0;
	int			i;

	dq_hold_written();			/* an error came between */
	for (i = nlive - 1; i >= 0 && live[i].level >= level; i--)
	{
		if (committed)
			live[i].level = level - 1;
		else
		{
			dq_hold_sent(live[i].token);
			nlive = i;
			back = true;
		}
	}
	return back;
}
