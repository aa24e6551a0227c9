#!/bin/sh
# The story of ./dev demo: orders that are not paid in time. Expects PSQL,
# REDIS_CLI, REDIS_SOCKET and the PG* variables of a running server.
set -eu

q() { "$PSQL" -X -q -At -v ON_ERROR_STOP=1 "$@"; }
table() { "$PSQL" -X -q -v ON_ERROR_STOP=1 -P footer=off -c "$1" | sed 's/^/   /;/^ *$/d'; }
cli() { "$REDIS_CLI" -s "$REDIS_SOCKET" --raw "$@"; }
step() { echo "$*"; }

step "1. A server, and a queue: a queue is a foreign table."
q <<SQL
SET client_min_messages = warning;
CREATE EXTENSION dq_bridge;
CREATE SERVER redis FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '$REDIS_SOCKET');
SELECT '   dq_create_queue: ' || dq_create_queue('order_timeout');
SQL

step "2. A shop: an order waits pay_within for its money; two triggers, no PL."
q <<'SQL'
CREATE TABLE orders (id int PRIMARY KEY, item text, paid bool DEFAULT false,
                     pay_within interval NOT NULL);
CREATE TRIGGER ordered AFTER INSERT OR UPDATE OF pay_within ON orders FOR EACH ROW
  EXECUTE FUNCTION dq_offer_trigger('order_timeout', 'pay_within', 'id', 'item');
CREATE TRIGGER paid AFTER UPDATE OF paid ON orders FOR EACH ROW
  WHEN (NEW.paid) EXECUTE FUNCTION dq_remove_trigger('order_timeout', 'id');
SQL
echo "   ordered: dq_offer_trigger     paid: dq_remove_trigger"

step "3. Four orders are committed; a fifth is rolled back."
q <<'SQL'
INSERT INTO orders VALUES (1, 'lamp', false, '6s'), (2, 'book', false, '4s'),
                          (3, 'sofa', false, '5s'), (4, 'fern', false, '7s');
BEGIN;
INSERT INTO orders VALUES (5, 'ghost', false, '3s');
ROLLBACK;
SELECT '   orders: ' || string_agg(item, ', ' ORDER BY id) FROM orders;
SQL

step "4. What is pending, from the foreign table:"
table "SELECT key, payload, date_trunc('second', due_at - now()) + '1s' AS due_in
       FROM order_timeout ORDER BY due_at"
seen_pending=$(q -c "SELECT string_agg(payload, ' ' ORDER BY due_at) FROM order_timeout")

step "5. Order 3 is paid in time; its task is gone with that commit."
q -c "UPDATE orders SET paid = true WHERE id = 3"
table "SELECT key, payload FROM order_timeout ORDER BY due_at"
seen_paid=$(q -c "SELECT string_agg(payload, ' ' ORDER BY due_at) FROM order_timeout")

step "6. The rest time out. Any Redis client takes them, here redis-cli BLPOP:"
seen=
for n in 1 2 3; do
	item=$(cli BLPOP order_timeout 20 | sed -n 2p)
	echo "   BLPOP order_timeout 20  ->  ${item:-(nothing)}"
	seen="$seen${seen:+ }$item"
done
more=$(cli BLPOP order_timeout 2 | sed -n 2p)
echo "   BLPOP order_timeout 2   ->  ${more:-(nothing more)}"

step "7. Expected and seen:"
rc=0
row() {
	if [ "$2" = "$3" ]; then _v=agrees; else _v=DIFFERS; rc=1; fi
	printf '   %-26s %-19s %-19s %s\n' "$1" "$2" "$3" "$_v"
}
printf '   %-26s %-19s %-19s\n' "" expected seen
row "pending after the orders" "book sofa lamp fern" "$seen_pending"
row "pending once 3 is paid" "book lamp fern" "$seen_paid"
row "timed out, in order" "book lamp fern" "$seen"
row "rolled back or paid, fired" "nothing" "${more:-nothing}"
exit $rc
