-- lib.lua: goes before every other script. Key names, the fence, members, the
-- index. Nothing in here writes unless its name says so.
--
-- KEYS (the same fourteen for every script, all in one hash slot): pending set,
-- ready list, channel, companion list, index, fence, hold, claim, quarantine,
-- owner, twins, held, gone, taken.
local PENDING, READY, CHANNEL, INDEX, FENCE = KEYS[1], KEYS[2], KEYS[3], KEYS[5], KEYS[6]
local HOLD, CLAIM, BAD, OWNER, TWINS = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local HELD, GONE, TAKEN = KEYS[12], KEYS[13], KEYS[14]
local call, sub, byte, char = redis.call, string.sub, string.byte, string.char
local floor = math.floor

-- status codes, see DqStatus
local OK, SESSION, BEHIND, POSITION, FROZEN, NOTOWNER, NODE, WAITS = 0, 1, 2, 3, 4, 5, 6, 7

-- A key of a wrong type is refused before the first write.
local function typed(key, want)
  local t = call('TYPE', key).ok
  if t ~= 'none' and t ~= want then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. t .. ', not a ' .. want)
  end
end

local function types()
  return typed(PENDING, 'zset') or typed(INDEX, 'hash') or typed(FENCE, 'hash')
    or typed(TWINS, 'zset') or typed(BAD, 'hash') or typed(OWNER, 'hash')
    or typed(HOLD, 'hash') or typed(HELD, 'zset') or typed(GONE, 'zset')
    or typed(TAKEN, 'hash')
end

local function counter(text)
  return not text or (#text <= 18 and string.find(text, '^-?%d+$') ~= nil)
end

-- Where the fence of a source stands: session, whether it is thawed for that
-- session, version (-1: none, -2: somebody has put into the fence what cannot be
-- counted), position ('' none). PO 6: part of every reply.
local function fence(source)
  local f = call('HMGET', FENCE, 'session', 'open', 'ver:' .. source, 'pos:' .. source, 'indexed')
  local session = f[1] or ''
  local open = 0
  if session ~= '' and f[2] == session then open = 1 end
  if not counter(f[3]) or not counter(f[5]) then return session, open, -2, f[4] or '' end
  return session, open, tonumber(f[3] or '-1'), f[4] or ''
end

-- Now, in ms, by this server's clock.
local function clock()
  local t = call('TIME')
  return tonumber(t[1]) * 1000 + floor(tonumber(t[2]) / 1000)
end

local function head()
  local h = call('ZRANGE', PENDING, 0, 0, 'WITHSCORES')
  return h[2] or ''
end

-- The common beginning of a reply.
local function reply(status, source, ...)
  local session, open, version, position = fence(source)
  return {status, session, open, version, position, head(), ...}
end

-- PO 7: who talks to another session, or to a Redis that went back, is refused.
local function refused(session, least, source)
  local s, _, version = fence(source)
  if s ~= session then return SESSION end
  if version < least then return BEHIND end
end

-- No task and no index entry is called so: removing it asks for the right alone.
local NOTHING = '\0dq_bridge:nothing'

-- Sources that feed the shard and do not own it, and are alive. The fence has a few
-- fields for each source.
local function live_producers()
  local ms, live = clock(), {}
  local f = call('HGETALL', FENCE)
  for i = 1, #f, 2 do
    if sub(f[i], 1, 6) == 'lease:' and (tonumber(f[i + 1]) or 0) > ms then
      live[#live + 1] = sub(f[i], 7)
    end
  end
  return live
end

-- ---- members: struct.pack('Bc0Lc0', #id, id, #payload, payload) -------------

local function pack(id, payload)
  return struct.pack('Bc0Lc0', #id, id, #payload, payload)
end

-- Redisson's format, before 3.21.1 also 'dLc0'. Returns kind ('n' new, 'o' old),
-- id bytes, payload; or nil and why not.
local SIZE = struct.size('L')
local function parse(m)
  local len = #m
  local n = byte(m, 1)
  if n and len >= 1 + n + SIZE then
    if 1 + n + SIZE + struct.unpack('L', m, 2 + n) == len then
      return 'n', sub(m, 2, 1 + n), sub(m, 2 + n + SIZE)
    end
  end
  if len >= 8 + SIZE and 8 + SIZE + struct.unpack('L', m, 9) == len then
    return 'o', sub(m, 1, 8), sub(m, 9 + SIZE)
  end
  return nil, 'not a packed task'
end

-- What is sent of a task when its payload is not wanted: a long member's head, and
-- behind its score what it is ('x': nobody can read it).
local function headed(m, score)
  if #m <= 100 then return m, score end
  local kind, id = parse(m)
  if kind == 'n' then return sub(m, 1, 1 + #id + SIZE), score .. 'n' end
  if kind == 'o' then return sub(m, 1, 8 + SIZE), score .. 'o' end
  return '', score .. 'x'
end

-- Byte order of two strings. Lua's own < follows the locale.
local function before(a, b)
  local n = #a
  if #b < n then n = #b end
  for i = 1, n, 64 do
    local e = i + 63
    if e > n then e = n end
    if sub(a, i, e) ~= sub(b, i, e) then
      for j = i, e do
        local x, y = byte(a, j), byte(b, j)
        if x ~= y then return x < y end
      end
    end
  end
  return #a < #b
end

local function digits(due)
  return string.format('%.0f', due)
end

-- Rank of the first member with this score that is not before `bound`, and the
-- rank after the last one with this score. O(log N * log N).
local function lower_bound(set, score, bound)
  local low = call('ZCOUNT', set, '-inf', '(' .. score)
  local stop = low + call('ZCOUNT', set, score, score)
  local high = stop
  while low < high do
    local mid = floor((low + high) / 2)
    local m = call('ZRANGE', set, mid, mid)[1]
    if before(m, bound) then low = mid + 1 else high = mid end
  end
  return low, stop
end

-- The member of a set with this due (digits) and id, or nil. Behind a member of
-- HELD stands its token, tail bytes long.
local function locate_in(set, tail, due, id)
  if #id > 255 then return nil end
  local prefix = char(#id) .. id
  local n = #prefix
  local few = call('ZRANGEBYSCORE', set, due, due, 'LIMIT', 0, 3)
  for _, m in ipairs(few) do
    if sub(m, 1, n) == prefix then return m end
    if #id == 8 and sub(m, 1, 8) == id and parse(sub(m, 1, #m - tail)) == 'o' then return m end
  end
  if #few < 3 then return nil end
  local rank = lower_bound(set, due, prefix)
  local m = call('ZRANGE', set, rank, rank, 'WITHSCORES')
  if m[1] and sub(m[1], 1, n) == prefix and m[2] == due then return m[1] end
end

local function locate(due, id)
  return locate_in(PENDING, 0, due, id)
end

-- The task at a place: its member, and under a hold its token as well.
local function seek(due, id)
  local m = locate(due, id)
  if m then return m end
  m = locate_in(HELD, 16, due, id)
  if m then return sub(m, 1, -17), sub(m, -16) end
end

-- ---- the index ----------------------------------------------------------------
-- hash: 'k'..key -> place, 'i'..id8 -> key (keyed tasks); 'p'..payload or
-- 'd'..digest -> place, or 't': several, then zset TWINS holds
-- char(#field)..field..place, all with score 0, so the earliest due comes first.
-- A place is due (6 bytes big-endian) .. id8.

local function six(due)
  local hi, lo = floor(due / 16777216), due % 16777216
  return char(floor(hi / 65536) % 256, floor(hi / 256) % 256, hi % 256,
    floor(lo / 65536), floor(lo / 256) % 256, lo % 256)
end

-- A damaged entry leads nowhere: no score is below zero.
local function place_due(place)
  if #place ~= 14 then return '-1' end
  local a, b, c, d, e, f = byte(place, 1, 6)
  return digits(((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f)
end

local function payload_field(payload)
  if #payload <= 40 then return 'p' .. payload end
  return 'd' .. redis.sha1hex(payload)
end

local function twin(field, place)
  return char(#field) .. field .. place
end

local function twin_range(field)
  local p = char(#field) .. field
  return '[' .. p, '[' .. p .. string.rep('\255', 15)
end

-- WRITES. Forget the index entries of a task that left the pending set. 1 if there
-- were any.
local function unindex_write(id, payload, due)
  if #id ~= 8 then return 0 end
  local key = call('HGET', INDEX, 'i' .. id)
  if key then
    call('HDEL', INDEX, 'i' .. id)
    local place = call('HGET', INDEX, 'k' .. key)
    if place and sub(place, 7) == id then call('HDEL', INDEX, 'k' .. key) end
    return 1
  end
  local field = payload_field(payload)
  local place = call('HGET', INDEX, field)
  if place == 't' then
    local n = call('ZREM', TWINS, twin(field, six(tonumber(due)) .. id))
    if call('ZLEXCOUNT', TWINS, twin_range(field)) == 0 then call('HDEL', INDEX, field) end
    return n
  elseif place and sub(place, 7) == id then
    return call('HDEL', INDEX, field)
  end
  return 0
end

-- WRITES. Take a member out of the pending set. Returns how many were taken, and
-- how many of them the index knew.
local function take_write(member)
  local due = call('ZSCORE', PENDING, member)
  if not due then return 0, 0 end
  call('ZREM', PENDING, member)
  local kind, id, payload = parse(member)
  if kind ~= 'n' then return 1, 0 end
  return 1, unindex_write(id, payload, due)
end

-- Does the index lead to this task? Returns its key as well.
local function entry(member, due)
  local kind, id, payload = parse(member)
  if kind ~= 'n' or #id ~= 8 then return false end
  local key = call('HGET', INDEX, 'i' .. id)
  if key then return true, key end
  local field = payload_field(payload)
  local place = call('HGET', INDEX, field)
  if place == 't' then
    return call('ZSCORE', TWINS, twin(field, six(tonumber(due)) .. id)) ~= false
  end
  return place and sub(place, 7) == id or false
end

-- ---- holds ----------------------------------------------------------------------
-- A held task is in HELD instead of PENDING, with its token behind the member. Its
-- index entries stay; they do not count as `indexed` meanwhile. HOLD: token ->
-- source|incarnation|xid|subxid|kind|dead|due|known| and the body: kind 'h' a task,
-- body its member; kind 'l' elements taken from the ready list, which lie in TAKEN under
-- the same token, each as Lc0, and in the place of due a number that grows from one
-- taking to the next. `polled` in FENCE counts the elements under such holds.
-- A dead one (the task was replaced or removed by somebody else) has no body.

local function record(source, incarnation, xid, subxid, kind, dead, due, known, body)
  return table.concat({source, incarnation, xid, subxid, kind, dead, due, known, body}, '|')
end

-- The record of a token in parts, or nil.
local function hold(token)
  local r = call('HGET', HOLD, token)
  if not r then return nil end
  local source, incarnation, xid, subxid, kind, dead, due, known, at =
    string.match(r, '^([^|]*)|([^|]*)|([^|]*)|([^|]*)|(%a)|(%d)|([^|]*)|(%d)|()')
  if not source then return nil end
  return {source = source, incarnation = incarnation, xid = xid, subxid = subxid, kind = kind,
    dead = dead == '1', due = due, known = known == '1', body = sub(r, at),
    head = sub(r, 1, at - 1)}
end

-- The elements under a hold of kind 'l', in order.
local function elements(token)
  local at, items, body = 1, {}, call('HGET', TAKEN, token) or ''
  while at <= #body do
    local item
    item, at = struct.unpack('Lc0', body, at)
    items[#items + 1] = item
  end
  return items
end

-- How many tasks and elements are held.
local function held_count()
  return call('ZCARD', HELD) + tonumber(call('HGET', FENCE, 'polled') or '0')
end

-- WRITES. The task under this hold is gone whatever becomes of its holder.
local function kill_write(token, h)
  call('ZREM', HELD, h.body .. token)
  local kind, id, payload = parse(h.body)
  if kind == 'n' then unindex_write(id, payload, h.due) end
  call('HSET', HOLD, token,
    record(h.source, h.incarnation, h.xid, h.subxid, h.kind, 1, h.due, 0, ''))
end

-- WRITES. Put back what was held; dead holds only end. Returns how many tasks or
-- elements came back, and how many of them the index knows.
local function back_write(token, h)
  local back, known = 0, 0
  if h.dead then
    -- nothing to put back
  elseif h.kind == 'h' then
    call('ZADD', PENDING, h.due, h.body)
    call('ZREM', HELD, h.body .. token)
    if h.known and entry(h.body, h.due) then known = 1 end
    back = 1
  else
    local items = elements(token)
    back = #items
    local turned = {}
    for i = 1, back do turned[i] = items[back + 1 - i] end
    for i = 1, back, 1000 do
      call('LPUSH', READY, unpack(turned, i, i + 999 < back and i + 999 or back))
    end
    call('HDEL', TAKEN, token)
    call('HINCRBY', FENCE, 'polled', -back)
  end
  call('HDEL', HOLD, token)
  return back, known
end

-- The token that holds a member, or nil.
local function holder_of(member, due)
  if call('ZCARD', HELD) == 0 then return nil end
  local rank = lower_bound(HELD, due, member)
  local m = call('ZRANGE', HELD, rank, rank, 'WITHSCORES')
  if m[1] and m[2] == due and sub(m[1], 1, -17) == member then return sub(m[1], -16) end
end

-- WRITES. PO 9: a relayed removal ends its own hold, else takes the task wherever
-- it is by now. Returns how many were taken and how many of them the index knew.
local function remove_write(member, due, token)
  local h = token ~= '' and hold(token)
  if h then
    -- a dead one stays until its transaction is known to have ended (goes_on)
    if h.dead then return 0, 0 end
    call('ZREM', HELD, member .. token)
    local kind, id, payload = parse(member)
    if kind == 'n' then unindex_write(id, payload, h.due) end
    call('HDEL', HOLD, token)
    return 1, 0
  end
  local n, known = take_write(member)
  if n == 0 then
    local other = holder_of(member, due)
    local o = other and hold(other)
    if o then
      kill_write(other, o)
      return 1, 0
    end
  end
  return n, known
end

-- WRITES. An entry that names a task which is not pending: a foreign transfer or
-- a stranger's ZREM took it. Forget it, so that the count of indexed tasks is
-- right again and tasks of foreign producers are looked for.
local sweeping = true
local function stale_write(field, place)
  if not sweeping then return end
  call('HDEL', INDEX, field)
  if sub(field, 1, 1) == 'k' then call('HDEL', INDEX, 'i' .. sub(place, 7)) end
  call('HINCRBY', FENCE, 'indexed', -1)
end

-- Was the member offered after the operation with this id? Only ids of the same
-- node and timeline tell.
local function later(m, bound)
  return bound ~= '' and byte(m, 1) == 8 and sub(m, 2, 4) == sub(bound, 1, 3)
    and before(bound, sub(m, 2, 9))
end

-- What dq_remove means by an element: the task whose key it is, else whose id
-- it is (due and id given), else the earliest keyless one with that payload.
-- Tasks whose ids are in skip, those for which passes(token) says so, and those
-- offered after bound, do not count. Returns member, due, how ('k', 'i' or 'p') and
-- the token under which it is held; how is 'a' with no member when it gave up at its
-- bound: ask again, there was progress. WRITES only where it comes upon stale entries.
local function find(element, due, id, skip, bound, passes, key_only)
  local function counts(m, token)
    return not (byte(m, 1) == 8 and skip[sub(m, 2, 9)]) and not later(m, bound)
      and not (token and passes(token))
  end
  local place = call('HGET', INDEX, 'k' .. element)
  if place and #place == 14 then
    local d = place_due(place)
    local m, token = seek(d, sub(place, 7))
    if m and counts(m, token) then return m, d, 'k', token end
    if not m then stale_write('k' .. element, place) end
  end
  if key_only then return nil end
  if due ~= '' then
    local m, token = seek(due, id)
    if m and counts(m, token) then return m, due, 'i', token end
  end
  -- the ids in skip are passed over without looking for them
  local function matches(p)
    if skip[sub(p, 7)] then return nil end
    local d = place_due(p)
    local m, token = seek(d, sub(p, 7))
    if m and counts(m, token) then
      local _, _, payload = parse(m)
      if payload == element then return m, d, 'p', token end
    end
    return nil, m == nil
  end
  local field = payload_field(element)
  place = call('HGET', INDEX, field)
  if place == 't' then
    local low, high = twin_range(field)
    local passed, left = 0, 1000
    while left > 0 do
      local some = call('ZRANGEBYLEX', TWINS, low, high, 'LIMIT', passed, 20)
      for _, t in ipairs(some) do
        local m, d, how, token = matches(sub(t, 2 + #field))
        if m then return m, d, how, token end
        if d and sweeping then
          call('ZREM', TWINS, t)
          call('HINCRBY', FENCE, 'indexed', -1)
          left = left - 1
        else
          passed = passed + 1
        end
      end
      if #some < 20 then break end
    end
    if left <= 0 then return nil, nil, 'a' end
    if sweeping and call('ZLEXCOUNT', TWINS, low, high) == 0 then call('HDEL', INDEX, field) end
  elseif place and #place == 14 then
    local m, d, how, token = matches(place)
    if m then return m, d, how, token end
    if d then stale_write(field, place) end
  end
end

-- Are there tasks that the index does not know, or entries of tasks that others
-- took? (foreign producers and transfers, index off)
local function unindexed()
  return call('ZCARD', PENDING) ~= tonumber(call('HGET', FENCE, 'indexed') or '0')
end
