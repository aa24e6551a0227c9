/*
 * wait.c
 *	  What calls that take tasks wait for: the relay, and the ends of transactions
 *	  that hold what they want.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "relay/relay.h"
#include "shared/points.h"

#include "access/subtrans.h"
#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/condition_variable.h"
#include "storage/lmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

/*
 * Wait until the relay has moved on; relay by hand if nobody else does. Callers
 * go on asking until their deadline.
 */
void
dq_wait_for_relay(Oid serverid, TimestampTz deadline)
{
	long		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);

	if (left <= 0)
		return;
	if (dq_wake_bridge(MyDatabaseId, serverid) || !dq_relay_by_hand(serverid, left))
	{
		ConditionVariablePrepareToSleep(&dq_shared()->progress);
		ConditionVariableTimedSleep(&dq_shared()->progress, Min(left, 10), PG_WAIT_EXTENSION);
		ConditionVariableCancelSleep();
	}
}

/*
 * As for a row lock: not part of the caller's deadline, but of lock_timeout, and seen
 * by the deadlock detector. false: a former owner's hold, which the bridge puts back.
 */
bool
dq_wait_for_holder(const DqHold *holder, const char *source, TimestampTz *deadline)
{
	FullTransactionId wait = FullTransactionIdFromU64(holder->subxid ? holder->subxid : holder->xid);
	TimestampTz began = GetCurrentTimestamp();

	if (strcmp(holder->source, source) != 0)
		return false;
	DQ_POINT("hold.wait");
	/*
	 * Numbers that an earlier life of the server had given out and this one may give
	 * out again belong to nobody we could wait for.
	 */
	if ((holder->incarnation == dq_incarnation() || holder->xid < dq_shared()->first_xid) &&
		!TransactionIdIsCurrentTransactionId(XidFromFullTransactionId(wait)))
	{
		if (U64FromFullTransactionId(ReadNextFullTransactionId()) - holder->xid <
			(UINT64CONST(1) << 31))
			XactLockTableWait(XidFromFullTransactionId(wait), NULL, NULL, XLTW_None);
	}
	*deadline += GetCurrentTimestamp() - began;
	DQ_POINT("hold.waited");
	return true;
}

/* Errors that say something of Redis, not of the caller. */
bool
dq_is_outage(int sqlstate)
{
	switch (ERRCODE_TO_CATEGORY(sqlstate))
	{
		case MAKE_SQLSTATE('0', '8', '0', '0', '0'):
		case MAKE_SQLSTATE('2', '8', '0', '0', '0'):
			return true;
	}
	return sqlstate == ERRCODE_CANNOT_CONNECT_NOW || sqlstate == ERRCODE_OUT_OF_MEMORY ||
		sqlstate == ERRCODE_READ_ONLY_SQL_TRANSACTION;
}
