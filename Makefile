# dq_bridge: transactional delayed tasks from PostgreSQL to Redis
EXTENSION = dq_bridge
MODULE_big = dq_bridge
PGFILEDESC = "dq_bridge - transactional delayed tasks in Redis"
DATA = $(wildcard sql/dq_bridge--*.sql)

SRCS = $(wildcard src/*.c src/*/*.c)
OBJS = $(SRCS:.c=.o)

REGRESS_OPTS = --inputdir=. --temp-config=t/regress.conf
REGRESS = $(patsubst sql/%.sql,%,$(filter-out sql/dq_bridge--%,$(sort $(wildcard sql/*.sql))))
ISOLATION = $(patsubst specs/%.spec,%,$(sort $(wildcard specs/*.spec)))
ISOLATION_OPTS = --inputdir=.
TAP_TESTS = 1

PKG_CONFIG ?= pkg-config
PG_CPPFLAGS = -I$(srcdir)/src $(shell $(PKG_CONFIG) --cflags hiredis)
# for t/040_points.pl: a library that waits at named points when it is told to
ifdef POINTS
PG_CPPFLAGS += -DDQ_POINTS
endif
SHLIB_LINK = $(shell $(PKG_CONFIG) --libs hiredis)
EXTRA_CLEAN = src/redis/scripts_text.h

# no LLVM bitcode: this library is I/O, not arithmetic
override with_llvm = no

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

PG_CFLAGS += -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -Wno-sign-compare $(WERROR)
override CFLAGS += $(PG_CFLAGS)
# the Lua scripts travel inside the library: lua/lib.lua goes before each
LUA = $(sort $(wildcard lua/*.lua))
src/redis/scripts_text.h: $(LUA) lua/embed.awk
	awk -f lua/embed.awk $(LUA) > $@.tmp && mv $@.tmp $@
src/redis/scripts.o: src/redis/scripts_text.h

HEADERS_ALL = $(wildcard src/*.h src/*/*.h)
$(OBJS): $(HEADERS_ALL)
