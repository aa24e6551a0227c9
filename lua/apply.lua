-- apply.lua: a page of committed operations, in order, exactly once.
--
-- ARGV 1 session, 2 floor, 3 source, 4 position expected (the predecessor),
--   5 position after the page, 6 writer stamp, 7 target snapshot ('': the batch
--   goes on), 8 '1': the batch is complete, 9 older snapshot to keep ('=' leave,
--   '' drop), 10 '1': keep the index, 11 number of operations; then operations:
--   'o' due place payload            offer without key
--   'k' due place payload key        offer with key: replaces the pending one
--   'r' member due token             remove exactly this member; ends the hold
--   's' due place payload key token  where a removed task goes instead; key '' none
--   'm' member due place             move it, if nobody holds it; keeps payload and key
--   'c' token n                      n elements taken from the ready list are consumed
--   'x' key                          remove the task with this key
--   'q' member                       drop it from the quarantine
-- A call of a queue that is not transactional: 1 may be '' (any session), 4 '!' and
--   the number of the asking process, 5 'life|number' of the call, 6 place, 7 '1':
--   producer, 8 node, 9 unused.
-- Reply: common part, tasks added, tasks removed.
-- Safe twice: the fence moves with the data, so a page whose predecessor is not
-- where the fence stands writes nothing (PO 3, PO 4). A call moves no fence; its
-- answer is remembered for its process instead, the same call gets the same answer,
-- and an older one is refused. Cost: ~6 us an operation.
local source = ARGV[3]
local at_once = sub(ARGV[4], 1, 1) == '!' and 'memo:' .. source .. ':' .. sub(ARGV[4], 2)
local wrong = types()
if wrong then return wrong end
local no = not (at_once and ARGV[1] == '') and refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return reply(no, source, 0, 0) end
if at_once then
  local o = call('HMGET', OWNER, 'source', 'place')
  if ARGV[7] ~= '1' and o[1] and (o[1] ~= source or o[2] ~= ARGV[6]) then
    return reply(NOTOWNER, source, 0, 0)
  end
  local f = call('HMGET', FENCE, 'node:' .. ARGV[8], at_once)
  if f[1] and f[1] ~= source then return reply(NODE, source, 0, 0) end
  local life, number, added, removed = string.match(f[2] or '', '^(%d+)|(%d+)|(%d+)|(%d+)$')
  local mine, this = string.match(ARGV[5], '^(%d+)|(%d+)$')
  if not mine then return redis.error_reply('ERR dq_bridge: call ' .. ARGV[5]) end
  if life == mine and number == this then
    return reply(OK, source, tonumber(added), tonumber(removed))
  end
  if life == mine and tonumber(number) > tonumber(this) then return reply(POSITION, source, 0, 0) end
  -- it removes what it has taken, or does nothing
  if ARGV[12] == 'r' then
    local h = hold(ARGV[15] or '')
    if not h or h.dead then return reply(OK, source, 0, 0) end
  end
else
  local _, _, _, position = fence(source)
  if position ~= ARGV[4] then return reply(POSITION, source, 0, 0) end
end

-- arguments are counted before the first write
local SHAPE = {o = 4, k = 5, s = 6, r = 4, m = 4, c = 3, x = 2, q = 2}
local at, stop, discards = 12, #ARGV, false
for _ = 1, tonumber(ARGV[11]) do
  local n = SHAPE[ARGV[at] or '']
  if ARGV[at] == 'q' then discards = true end
  if not n then return redis.error_reply('ERR dq_bridge: operation ' .. tostring(ARGV[at])) end
  at = at + n
end
if at ~= stop + 1 then return redis.error_reply('ERR dq_bridge: page of a wrong length') end

local index = ARGV[10] == '1'
local first = head()
local gone = call('ZCARD', GONE) > 0

-- A removal of another source's task that is not here: data were lost, and that
-- source will offer it again. Its id is remembered, so that it stays removed.
local function bury_write(m)
  local kind, id = parse(m)
  if kind ~= 'n' or #id ~= 8 then return end
  local node = byte(id, 1) * 256 + byte(id, 2)
  if call('HGET', FENCE, 'node:' .. node) == source then return end
  call('ZADD', GONE, clock(), id)
end
local function is_gone(id)
  return gone and call('ZSCORE', GONE, id)
end

-- The first write, and one that is refused when memory is short.
-- (A call is no part of what heals, and who enters does not wait for a quiet moment.)
call('HINCRBY', FENCE, (at_once and 'calls:' or 'ver:') .. source, 1)
-- Rights that are needed later fail here, before any task has moved.
call('ZREM', PENDING, NOTHING)
call('HDEL', INDEX, NOTHING)
call('ZREM', TWINS, NOTHING)
call('ZREM', HELD, NOTHING)
call('HDEL', HOLD, NOTHING)
call('HDEL', TAKEN, NOTHING)
if discards then call('HDEL', BAD, NOTHING) end

local added, removed, indexed = 0, 0, 0
local zadd, hset, twins, dead = {}, {}, {}, {}
local fields, places, members, keys, ids, seen = {}, {}, {}, {}, {}, {}

local function send(command, key, list)
  local n = #list
  if n == 0 then return 0 end
  local sum = 0
  for i = 1, n, 1000 do
    local e = i + 999
    if e > n then e = n end
    sum = sum + call(command, key, unpack(list, i, e))
  end
  return sum
end

-- Offers are gathered in runs; a run is written when an operation needs to see it.
local function flush()
  local n = #fields
  local known = {}
  for i = 1, n, 1000 do
    local e = i + 999
    if e > n then e = n end
    local part = call('HMGET', INDEX, unpack(fields, i, e))
    for j = 1, #part do known[i + j - 1] = part[j] end
  end
  local h, old = 0, {}
  for i = 1, n do
    local field, place, was = fields[i], places[i], known[i]
    if keys[i] then
      if was and was ~= place then old[#old + 1] = was end
      hset[h + 1], hset[h + 2] = field, place
      hset[h + 3], hset[h + 4] = 'i' .. ids[i], keys[i]
      h = h + 4
    else
      was = seen[field] or was
      if not was then
        seen[field] = place
        hset[h + 1], hset[h + 2] = field, place
        h = h + 2
      elseif was ~= place then
        if was ~= 't' then
          twins[#twins + 1] = 0
          twins[#twins + 1] = twin(field, was)
          seen[field] = 't'
          hset[h + 1], hset[h + 2] = field, 't'
          h = h + 2
        end
        twins[#twins + 1] = 0
        twins[#twins + 1] = twin(field, place)
      end
    end
  end
  local new = send('ZADD', PENDING, zadd)
  added = added + new
  if index then indexed = indexed + new end
  send('HSET', INDEX, hset)
  send('ZADD', TWINS, twins)
  -- a key offered again replaces the pending task
  for _, place in ipairs(old) do
    local id = sub(place, 7)
    local m, token = seek(place_due(place), id)
    local n = call('HDEL', INDEX, 'i' .. id)
    if token then
      -- held: it must not come back beside its successor (PO 10, H10)
      local h = hold(token)
      if h then kill_write(token, h) end
      removed = removed + 1
    else
      if m then removed = removed + call('ZREM', PENDING, m) end
      indexed = indexed - n
    end
  end
  zadd, hset, twins = {}, {}, {}
  fields, places, keys, ids, seen = {}, {}, {}, {}, {}
end

-- A rescheduled task does not come where its removal found nothing to remove: while
-- it was held it has been replaced (then the key has another task) or removed (then
-- its hold is dead, and stands).
local function goes_on(key, token)
  if token ~= '' and call('HDEL', HOLD, token) == 1 then return false end
  local place = key ~= '' and call('HGET', INDEX, 'k' .. key)
  return not (place and #place == 14 and seek(place_due(place), sub(place, 7)))
end

local z, f = 0, 0
local function offer(due, place, payload, key)
  local field = key and 'k' .. key
  if field and seen[field] then
    flush()
    z, f = 0, 0
  end
  local id = sub(place, 7)
  zadd[z + 1], zadd[z + 2] = due, pack(id, payload)
  z = z + 2
  if field then
    f = f + 1
    fields[f], places[f], keys[f], ids[f] = field, place, key, id
    seen[field] = place
  elseif index then
    f = f + 1
    fields[f], places[f] = payload_field(payload), place
  end
end

at = 12
while at <= stop do
  local op = ARGV[at]
  if op == 'o' then
    if not is_gone(sub(ARGV[at + 2], 7)) then
      offer(ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
    end
    at = at + 4
  elseif op == 'k' and not is_gone(sub(ARGV[at + 2], 7)) then
    offer(ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4])
    at = at + 5
  else
    flush()
    z, f = 0, 0
    local n, known = 0, 0
    if op == 's' then
      local key = ARGV[at + 4]
      if not is_gone(sub(ARGV[at + 2], 7)) and goes_on(key, ARGV[at + 5]) then
        offer(ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], key ~= '' and key or nil)
      end
    elseif op == 'r' then
      n, known = remove_write(ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
      if n == 0 then bury_write(ARGV[at + 1]) end
    elseif op == 'm' then
      local kind, id, payload = parse(ARGV[at + 1])
      local key = kind == 'n' and #id == 8 and call('HGET', INDEX, 'i' .. id)
      if kind then n, known = take_write(ARGV[at + 1]) end
      if n > 0 then offer(ARGV[at + 2], ARGV[at + 3], payload, key) end
    elseif op == 'q' then
      call('HDEL', BAD, ARGV[at + 1])
    elseif op == 'c' then
      call('HDEL', TAKEN, ARGV[at + 1])
      if call('HDEL', HOLD, ARGV[at + 1]) == 1 then
        call('HINCRBY', FENCE, 'polled', -tonumber(ARGV[at + 2]))
      end
    else
      -- also of an offer whose task was removed: what it replaced stays replaced
      local key = op == 'k' and ARGV[at + 4] or ARGV[at + 1]
      local place = call('HGET', INDEX, 'k' .. key)
      local m = place and #place == 14 and seek(place_due(place), sub(place, 7))
      if m then n, known = remove_write(m, place_due(place), '') end
    end
    removed = removed + n
    indexed = indexed - known
    at = at + SHAPE[op]
  end
end
flush()

-- The fence, last: position, writer (PO 5), and the snapshots of the batch.
local set = {'pos:' .. source, ARGV[5], 'who:' .. source, ARGV[6]}
local function put(field, value)
  set[#set + 1] = field .. source
  set[#set + 1] = value
end
local cur = ARGV[7]
if at_once then
  -- the node is left to who enters: this source may be rolled back
  set = {at_once, ARGV[5] .. '|' .. added .. '|' .. removed}
elseif ARGV[8] == '1' then
  if cur == '' then cur = call('HGET', FENCE, 'cur:' .. source) or '' end
  put('prev:', cur)
  put('cur:', '')
elseif cur ~= '' then
  put('cur:', cur)
end
if at_once then
  -- no snapshots
elseif ARGV[9] == '' then
  call('HDEL', FENCE, 'old:' .. source)
elseif ARGV[9] ~= '=' then
  put('old:', ARGV[9])
end
call('HSET', FENCE, unpack(set))
if indexed ~= 0 then call('HINCRBY', FENCE, 'indexed', indexed) end

-- Redisson's timers sleep to the head they know: tell them of an earlier one.
local now = head()
if now ~= '' and now ~= first and (first == '' or tonumber(now) < tonumber(first)) then
  -- a user without the right on the channel does without timers
  redis.pcall('PUBLISH', CHANNEL, now)
end
return reply(OK, source, added, removed)
