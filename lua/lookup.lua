-- lookup.lua: pending tasks, held ones included, by key or by id. Writes nothing.
--
-- ARGV 1 source, 2 letters: 'f' the fence's snapshots as well, 's' long payloads are
--   left out; 3 and more: what to look for, two each: 'k' and a key, or the digits of a
--   due instant and the head of a member, that is its length byte and id (of the old
--   format the id alone).
-- Reply: common part, prev, cur, old, how many were looked for (the page may be full
-- before), then for each task found score, member and key, as of range.lua. For an id
-- whose millisecond has scores that are no whole numbers also: '' and the number of
-- what was looked for, and nil: the caller reads that millisecond.
-- Cost: O(log N * log N) each.
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local cut = string.find(ARGV[2], 's', 1, true) ~= nil
local s = {}
if string.find(ARGV[2], 'f', 1, true) then
  s = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source)
end
local out = reply(OK, source, s[1] or '', s[2] or '', s[3] or '', 0)
local o, bytes = #out, 0

local function give(m, due)
  local key
  if byte(m, 1) == 8 and #m >= 9 + SIZE then key = call('HGET', INDEX, 'i' .. sub(m, 2, 9)) end
  bytes = bytes + #m
  if cut then m, due = headed(m, due) end
  out[o + 1], out[o + 2], out[o + 3] = due, m, key or false
  o = o + 3
end

-- All members of a set at an instant that begin like this: ids may not be unique in
-- what others have written, so some at most.
local function at(set, tail, due, start)
  local rank, stop = lower_bound(set, due, start)
  local last = rank + 99
  if last > stop - 1 then last = stop - 1 end
  for i = rank, last, 10 do
    local e = i + 9
    if e > last then e = last end
    for _, m in ipairs(call('ZRANGE', set, i, e)) do
      if sub(m, 1, #start) ~= start then return end
      give(sub(m, 1, #m - tail), due)
    end
  end
end

local held = call('ZCARD', HELD) > 0
local n = (#ARGV - 2) / 2
for i = 1, n do
  local what, which = ARGV[1 + 2 * i], ARGV[2 + 2 * i]
  if what == 'k' then
    local place = call('HGET', INDEX, 'k' .. which)
    if place and #place == 14 then
      local due = place_due(place)
      local m = seek(due, sub(place, 7))
      if m then give(m, due) end
    end
  else
    at(PENDING, 0, what, which)
    if held then at(HELD, 16, what, which) end
    local before_it = '(' .. digits(tonumber(what) - 1)
    if call('ZCOUNT', PENDING, before_it, '(' .. what) > 0
      or (held and call('ZCOUNT', HELD, before_it, '(' .. what) > 0) then
      out[o + 1], out[o + 2], out[o + 3] = '', i, false
      o = o + 3
    end
  end
  out[10] = i
  if bytes > 1048576 then break end
end
return out
