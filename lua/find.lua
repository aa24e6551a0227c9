-- find.lua: which pending task does an element name? For removals that were
-- recorded without an answer. Writes nothing but stale index entries away.
--
-- ARGV 1 source, 2 element, 3 due and 4 id bytes if the element has the form of
--   an id (else ''), 5 place, 6 id of the asking operation ('': none): tasks offered
--   after it do not count.
-- Reply: common part, member ('' none), due, how ('k' key, 'i' id, 'p' payload,
-- 'a' ask again),
-- '1' if tasks exist that the index does not know, the fence's prev, its writer,
-- and old, owner's source and place, key ('-' none, else '+'..key). A task that
-- some transaction holds counts: a removal that has committed goes first.
-- Cost: O(log N * log N).
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local o = call('HMGET', OWNER, 'source', 'place')
-- only the owner's index is the asker's to sweep
sweeping = o[1] == source and o[2] == ARGV[5]
local member, due, how = find(ARGV[2], ARGV[3], ARGV[4], {}, ARGV[6], function() end, false)
local s = call('HMGET', FENCE, 'prev:' .. source, 'who:' .. source, 'old:' .. source)
local more, key = 0, '-'
if not member and unindexed() then more = 1 end
if member then
  local _, k = entry(member, due)
  if k then key = '+' .. k end
end
return reply(OK, source, member or '', due or '', how or '', more,
  s[1] or '', s[2] or '', s[3] or '', o[1] or '', o[2] or '', key)
