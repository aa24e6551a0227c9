#!/bin/sh
# Prints the struct, enum and union types of dq_bridge, one a line, for
# pgindent --typedefs (append PostgreSQL's own list to it). ./dev typedefs
# writes it to src/typedefs.list.
cd "$(dirname "$0")" || exit 1
cat ./*.h ./*/*.h ./*.c ./*/*.c 2>/dev/null |
	sed -n -e 's/^typedef \(struct\|enum\|union\) \([A-Za-z_][A-Za-z0-9_]*\).*/\2/p' \
		-e 's/^} *\([A-Za-z_][A-Za-z0-9_]*\);.*/\1/p' \
		-e 's/^typedef .*(\*\([A-Za-z_][A-Za-z0-9_]*\)) *(.*/\1/p' |
	LC_ALL=C sort -u
