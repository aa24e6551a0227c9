-- count.lua: how many tasks are pending, held ones included, within ranges of due
-- instants, and when the first and the last of them is due. Writes nothing.
--
-- ARGV 1 source, 2 and more: the ranges, two each, as of range.lua, the earliest first.
-- Reply: common part, prev, cur, old, how many, score of the first and of the last (''
-- when there is none), 1 if tasks are pending that the index does not know: among those
-- there may be some that nobody can read.
-- Cost: O(log N) for each range.
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local s = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source)
local count, first, last = 0, nil, nil
for r = 2, #ARGV, 2 do
  local lo, hi = ARGV[r], ARGV[r + 1]
  for _, set in ipairs({PENDING, HELD}) do
    local from = lo == '' and 0 or call('ZCOUNT', set, '-inf', lo)
    local to = hi == '' and call('ZCARD', set) or call('ZCOUNT', set, '-inf', hi)
    if to > from then
      count = count + to - from
      local a = call('ZRANGE', set, from, from, 'WITHSCORES')[2]
      local b = call('ZRANGE', set, to - 1, to - 1, 'WITHSCORES')[2]
      if not first or tonumber(a) < tonumber(first) then first = a end
      if not last or tonumber(b) > tonumber(last) then last = b end
    end
  end
end
return reply(OK, source, s[1] or '', s[2] or '', s[3] or '', count, first or '', last or '',
  unindexed() and 1 or 0)
