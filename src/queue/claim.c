/*
 * claim.c
 *	  claim.lua: batches of due tasks that are lent to PostgreSQL (PO 13, PO 14).
 *	  Called by the deliver room; the relay asks it for what is left when a queue has
 *	  no sink any more.
 */
#include "postgres.h"

#include "queue/operations_private.h"

#define CLAIM_FIXED	(FENCE_ELEMENTS + 6)

/* 'score|key length or -|key, member' */
static void
read_lent(const DqReply *e, DqTask *lent)
{
	const char *bar = memchr(e->str, '|', e->len);
	const char *second = bar ? memchr(bar + 1, '|', e->len - (bar + 1 - e->str)) : NULL;
	const char *body;
	const char *end = e->str + e->len;
	size_t		key_len = 0;

	if (second == NULL || bar - e->str > 40 || second - bar > 20)
		ereport(ERROR,
				(errcode(ERRCODE_PROTOCOL_VIOLATION),
				 errmsg("unexpected reply of script \"%s\"", dq_script_name(DQ_SCRIPT_CLAIM))));
	memset(lent, 0, sizeof(*lent));
	lent->score = strtod(pnstrdup(e->str, bar - e->str), NULL);
	lent->due = dq_score_ms(lent->score);
	body = second + 1;
	if (bar[1] != '-')
	{
		key_len = strtoul(pnstrdup(bar + 1, second - bar - 1), NULL, 10);
		lent->key = body;
		lent->key_len = Min(key_len, (size_t) (end - body));
	}
	lent->member = body + lent->key_len;
	lent->member_len = end - lent->member;
	dq_task_parse(lent);
}

/*
 * Raises what Redis answers as an error. The tasks point into the reply, which lives
 * in the current memory context.
 */
void
dq_op_claim(DqRedis *redis, const char *queue, const DqKeys *keys, const DqClaimArgs *args,
			DqClaimed *claimed)
{
	DqArg		a[14];
	char		least[24],
				now[24],
				number[24],
				found[24],
				limit[24];
	DqReply    *reply;
	int			i;

	a[0] = DQ_ARG(args->session);
	a[1] = ARG_INT(least, args->floor);
	a[2] = DQ_ARG(args->source);
	a[3] = ARG_INT(now, args->now);
	a[4] = ARG_INT(number, args->number);
	a[5] = DQ_ARG(args->nonce);
	a[6] = DQ_ARG(args->next_nonce);
	a[7] = ARG_INT(limit, args->limit);
	a[8] = DQ_ARG("524288");
	a[9] = DQ_ARG(args->list ? "1" : "0");
	a[10] = DQ_ARG(args->skip);
	a[11] = args->renumber ? ARG_INT(found, args->found_number) : DQ_ARG("");
	a[12] = DQ_ARG(args->renumber ? args->found_nonce : "");
	a[13] = DQ_ARG(args->only_let_go ? "1" : "0");
	reply = dq_script_call(redis, queue, DQ_SCRIPT_CLAIM, keys, lengthof(a), a, CLAIM_FIXED);

	memset(claimed, 0, sizeof(*claimed));
	dq_fence_read(reply, &claimed->fence);
	i = FENCE_ELEMENTS;
	claimed->answer = (DqClaimAnswer) dq_part_int(reply, i++);
	claimed->number = dq_part_int(reply, i++);
	strlcpy(claimed->nonce, dq_part_text(reply, i++), sizeof(claimed->nonce));
	claimed->let_go = dq_part_int(reply, i++);
	claimed->quarantined = dq_part_int(reply, i++);
	claimed->more = dq_part_int(reply, i++) == 1;
	claimed->ntasks = reply->nelements - CLAIM_FIXED;
	claimed->tasks = palloc(Max(claimed->ntasks, 1) * sizeof(DqTask));
	for (int k = 0; k < claimed->ntasks; k++)
		read_lent(&reply->elements[i + k], &claimed->tasks[k]);
}
