-- status.lua: the fence, the owner and the numbers of a shard; renews the lease
-- of the session that owns it, and looks through a little of its index for
-- entries of tasks that others took.
--
-- ARGV 1 source, 2 session ('': only look), 3 lease (ms), 4 now (ms), 5 '1': with the
--   digest, 6 '1': a producer, 7 replay window (ms).
-- Reply: common part, prev, cur, old, writer, owner's source, place, host,
-- database, lease until (ms), Redis's clock (us), pending, holds, ready,
-- quarantined, overdue, type of the ready key, due of the earliest held task, '1' if
-- elements of the ready list may be held, digest of its first element, '1' if this
-- producer has reported for the session, producers that live (separated by spaces), held tasks
-- and elements, tasks lent to PostgreSQL. A lent task counts as held for its due.
-- Cost: O(log N).
local source = ARGV[1]
local wrong = types() or typed(CLAIM, 'hash')
if wrong then return wrong end
local t = call('TIME')
local us = t[1] .. string.format('%06d', tonumber(t[2]))
local ms = tonumber(t[1]) * 1000 + floor(tonumber(t[2]) / 1000)
local o = call('HMGET', OWNER, 'source', 'place', 'host', 'database', 'lease')
local session = fence(source)
if ARGV[2] ~= '' and ARGV[2] == session and o[1] == source then
  local lease = ms + tonumber(ARGV[3])
  -- written only when a third of it is gone
  if (tonumber(o[5] or '0') or 0) < lease - tonumber(ARGV[3]) / 3 then
    call('HSET', OWNER, 'lease', digits(lease))
    o[5] = digits(lease)
  end
end
local live = ''
if ARGV[2] ~= '' and ARGV[2] == session then
  if ARGV[6] == '1' then
    local until_ms = tonumber(call('HGET', FENCE, 'lease:' .. source) or '0')
    if until_ms < ms + tonumber(ARGV[3]) * 2 / 3 then
      call('HSET', FENCE, 'lease:' .. source, digits(ms + tonumber(ARGV[3])))
    end
  elseif o[1] == source then
    live = table.concat(live_producers(), ' ')
    if call('EXISTS', GONE) == 1 then
      call('ZREMRANGEBYSCORE', GONE, '-inf', digits(ms - tonumber(ARGV[7])))
    end
  end
end
-- Every entry is seen once in a while; faster where the count shows that some
-- are stale.
if ARGV[2] ~= '' and ARGV[2] == session and call('EXISTS', INDEX) == 1 then
  local count = 10
  if (tonumber(call('HGET', FENCE, 'indexed') or '0') or 0) > call('ZCARD', PENDING) then count = 300 end
  local cursor = string.match(call('HGET', FENCE, 'sweep') or '', '^%d+$') or '0'
  local scan = call('HSCAN', INDEX, cursor, 'COUNT', count)
  for i = 1, #scan[2], 2 do
    local field, place = scan[2][i], scan[2][i + 1]
    if sub(field, 1, 1) ~= 'i' and place ~= 't' and
      not seek(place_due(place), sub(place, 7)) then
      stale_write(field, place)
    end
  end
  call('HSET', FENCE, 'sweep', scan[1])
end
local f = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source,
  'who:' .. source, 'healed:' .. source)
local kind = call('TYPE', READY).ok
local ready = 0
if kind == 'list' then ready = call('LLEN', READY)
elseif kind == 'stream' then ready = call('XLEN', READY) end
-- Holds that are of no task in HELD: of elements of the list, or dead ones.
local holds, tasks = call('HLEN', HOLD), call('ZCARD', HELD)
local held = tasks > 0 and call('ZRANGE', HELD, 0, 0, 'WITHSCORES')[2] or ''
local claim = call('HMGET', CLAIM, 'n', 'low')
local lent = tonumber(claim[1] or '0') or 0
if lent > 0 and (held == '' or tonumber(claim[2]) < tonumber(held)) then held = claim[2] end
local first = ''
if ARGV[5] == '1' and kind == 'list' then first = redis.sha1hex(call('LINDEX', READY, 0)) end
return reply(OK, source, f[1] or '', f[2] or '', f[3] or '', f[4] or '',
  o[1] or '', o[2] or '', o[3] or '', o[4] or '', o[5] or '0', us,
  call('ZCARD', PENDING), holds, ready, call('HLEN', BAD),
  call('ZCOUNT', PENDING, '-inf', ARGV[4]), kind, held, holds > tasks and 1 or 0, first,
  f[5] == session and 1 or 0, live, held_count(), lent)
