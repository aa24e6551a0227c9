/*
 * address.c
 *	  Host names to socket addresses, remembered in this process.
 *
 *	  getaddrinfo() is the one call of this room that cannot be interrupted, so
 *	  it is made as rarely as possible: what a name meant is kept for a while,
 *	  also over failed attempts, and is used for longer when the name server does
 *	  not answer. Called by socket.c.
 */
#include "postgres.h"

#include <netdb.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <sys/un.h>

#include "redis/redis_private.h"
#include "utils/memutils.h"

#define VALID_MS		60000	/* an address that works may be used so long */
#define RETRY_MS		5000	/* one that does not is asked for again after */
#define MAX_HOSTS		64
#define MAX_ADDRESSES	16		/* of one name */

typedef struct Host
{
	char	   *name;
	int64		asked_ms;
	int64		valid_ms;		/* from asked_ms on */
	int			naddresses;
	DqAddress  *addresses;		/* with port 0 */
	struct Host *next;
} Host;

static Host *hosts = NULL;
static int	nhosts = 0;
static MemoryContext hosts_context = NULL;

static Host *
find_host(const char *name)
{
	Host	   *host;

	for (host = hosts; host != NULL; host = host->next)
		if (strcmp(host->name, name) == 0)
			return host;
	return NULL;
}

static void
remember(const char *name, const DqAddress *addresses, int naddresses)
{
	Host	   *host = find_host(name);

	if (hosts_context == NULL)
		hosts_context = AllocSetContextCreate(TopMemoryContext,
											  "dq_bridge addresses",
											  ALLOCSET_SMALL_SIZES);
	if (host == NULL)
	{
		/* names come from server options: so many are an accident */
		if (nhosts >= MAX_HOSTS)
		{
			hosts = NULL;
			nhosts = 0;
			MemoryContextReset(hosts_context);
		}
		host = MemoryContextAllocZero(hosts_context, sizeof(Host));
		host->name = MemoryContextStrdup(hosts_context, name);
		host->next = hosts;
		hosts = host;
		nhosts++;
	}
	if (host->addresses == NULL)
		host->addresses = MemoryContextAlloc(hosts_context,
											 sizeof(DqAddress) * MAX_ADDRESSES);
	memcpy(host->addresses, addresses, sizeof(DqAddress) * naddresses);
	host->naddresses = naddresses;
	host->asked_ms = dq_clock_ms();
	host->valid_ms = VALID_MS;
}

/*
 * Connecting failed, or the server there turned out to be the wrong one (a
 * demoted master): the name may mean another address by now.
 */
void
dq_address_distrust(const char *name, bool at_once)
{
	Host	   *host = name != NULL ? find_host(name) : NULL;

	if (host != NULL)
		host->valid_ms = at_once ? 0 : RETRY_MS;
}

static int
with_port(const Host *host, int port, DqAddress **result)
{
	DqAddress  *addresses = palloc(sizeof(DqAddress) * host->naddresses);
	int			i;

	memcpy(addresses, host->addresses, sizeof(DqAddress) * host->naddresses);
	for (i = 0; i < host->naddresses; i++)
	{
		if (addresses[i].addr.ss_family == AF_INET)
			((struct sockaddr_in *) &addresses[i].addr)->sin_port = htons(port);
		else
			((struct sockaddr_in6 *) &addresses[i].addr)->sin6_port = htons(port);
	}
	*result = addresses;
	return host->naddresses;
}

int
dq_address_lookup(const DqTarget *target, DqAddress **result)
{
	char	   *name = pstrdup(target->host);
	size_t		len = strlen(name);
	Host	   *host = find_host(target->host);
	struct addrinfo hint;
	struct addrinfo *list = NULL;
	struct addrinfo *ai;
	DqAddress	found[MAX_ADDRESSES];
	int			nfound = 0;
	int			rc;

	if (host != NULL && dq_clock_ms() - host->asked_ms < host->valid_ms)
		return with_port(host, target->port, result);

	/* [::1], as in a URL */
	if (len > 2 && name[0] == '[' && name[len - 1] == ']')
	{
		name[len - 1] = '\0';
		name++;
	}

	/*
	 * No AI_ADDRCONFIG: on a machine whose only IPv6 address is ::1 it would
	 * hide names that have nothing but an AAAA record.
	 */
	memset(&hint, 0, sizeof(hint));
	hint.ai_family = AF_UNSPEC;
	hint.ai_socktype = SOCK_STREAM;
	rc = getaddrinfo(name, NULL, &hint, &list);
	if (rc != 0)
	{
		int			save_errno = errno;

		/* better an old address than none while the name server is away */
		if (host != NULL)
		{
			host->asked_ms = dq_clock_ms();
			host->valid_ms = RETRY_MS;
			return with_port(host, target->port, result);
		}
		errno = save_errno;
		ereport(ERROR,
				(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
				 errmsg("could not connect to Redis server \"%s\": host name \"%s\" cannot be resolved",
						target->server, target->host),
				 errdetail("%s", rc == EAI_SYSTEM ? strerror(save_errno) : gai_strerror(rc)),
				 errhint("Check the option \"host\" of the foreign server.")));
	}

	for (ai = list; ai != NULL && nfound < MAX_ADDRESSES; ai = ai->ai_next)
	{
		if (ai->ai_family != AF_INET && ai->ai_family != AF_INET6)
			continue;
		memset(&found[nfound], 0, sizeof(DqAddress));
		memcpy(&found[nfound].addr, ai->ai_addr, ai->ai_addrlen);
		found[nfound].len = ai->ai_addrlen;
		nfound++;
	}
	freeaddrinfo(list);

	if (nfound == 0)
		ereport(ERROR,
				(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
				 errmsg("could not connect to Redis server \"%s\": host name \"%s\" has no IPv4 or IPv6 address",
						target->server, target->host),
				 errhint("Check the option \"host\" of the foreign server.")));

	remember(target->host, found, nfound);
	return with_port(find_host(target->host), target->port, result);
}

/* "10.0.0.1:6379", "[::1]:6379" or a socket's path, for messages */
char *
dq_address_text(const DqAddress *address)
{
	char		text[INET6_ADDRSTRLEN] = "?";

	switch (address->addr.ss_family)
	{
		case AF_INET:
			{
				const struct sockaddr_in *in = (const struct sockaddr_in *) &address->addr;

				inet_ntop(AF_INET, &in->sin_addr, text, sizeof(text));
				return psprintf("%s:%d", text, ntohs(in->sin_port));
			}
		case AF_INET6:
			{
				const struct sockaddr_in6 *in = (const struct sockaddr_in6 *) &address->addr;

				inet_ntop(AF_INET6, &in->sin6_addr, text, sizeof(text));
				return psprintf("[%s]:%d", text, ntohs(in->sin6_port));
			}
		default:
			return pstrdup(((const struct sockaddr_un *) &address->addr)->sun_path);
	}
}
