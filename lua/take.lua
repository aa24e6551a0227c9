-- take.lua: many exact tasks out of circulation, for an open transaction (PO 8 to 11):
-- what hold.lua does for one.
--
-- ARGV 1 session, 2 floor, 3 source, 4 incarnation, 5 xid, 6 subxid, 7 most bytes of
--   members; then of each task, best in the order in which they are pending: score, 'n'
--   (new format) or 'o' (old) with the id's bytes behind it, token (16 bytes), token
--   that may be taken over ('' none).
-- Reply: common part, the fence's prev, cur and old snapshots, owner's source and place,
-- how many tasks were looked at (the bytes are the bound); then of each of them member
-- ('' not there), score, key ('-' none, else '+'..key), and if another hold stands its
-- record without body and its token (else '').
-- Safe twice: under the same token it is the same hold. Cost: ~6 us a task.
local source = ARGV[3]
local wrong = types()
if wrong then return wrong end
local FIRST = 8
if (#ARGV - FIRST + 1) % 4 ~= 0 then return redis.error_reply('ERR dq_bridge: tasks of a wrong shape') end
for i = FIRST, #ARGV, 4 do
  if #ARGV[i + 2] ~= 16 then return redis.error_reply('ERR dq_bridge: token of a wrong length') end
  if not tonumber(ARGV[i]) or #ARGV[i + 1] > 256 then
    return redis.error_reply('ERR dq_bridge: no place of a task')
  end
end
local o = call('HMGET', OWNER, 'source', 'place')
local s = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source)
local function answer(status, n)
  return reply(status, source, s[1] or '', s[2] or '', s[3] or '', o[1] or '', o[2] or '', n)
end
if o[1] and o[1] ~= source then return answer(NOTOWNER, 0) end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return answer(no, 0) end
local session, open = fence(source)
if open ~= 1 or session == '' then return answer(FROZEN, 0) end

-- Tasks come in the order in which they are pending, and mostly one after the other:
-- so they are looked for in a window that moves on, and grows while all in it is wanted.
local window, at, hits, rank, wide = {}, 1, 0, nil, 4
local last, last_prefix = nil, nil

local function fill(...)
  window = call(...)
  at, hits = 1, 0
end

local function look(due, prefix, kind)
  local d, long = tonumber(due), #prefix
  local searched = false
  if last and (d < last or (d == last and before(prefix, last_prefix))) then
    window, at, hits, rank, wide = {}, 1, 0, nil, 4
  end
  last, last_prefix = d, prefix
  while true do
    while window[at] do
      local m, score = window[at], tonumber(window[at + 1])
      if score > d then return nil end
      if score == d then
        local p = sub(m, 1, long)
        if p == prefix then
          if parse(m) == kind then
            at, hits = at + 2, hits + 1
            return m, window[at - 1]
          end
        elseif before(prefix, p) then
          return nil
        end
      end
      at = at + 2
    end
    local n = #window / 2
    if n > 0 and hits == n and not searched then
      rank = rank or call('ZRANK', PENDING, window[#window - 1]) + 1
      if wide < 128 then wide = wide * 4 end
      fill('ZRANGE', PENDING, rank, rank + wide - 1, 'WITHSCORES')
      rank = rank + #window / 2
    elseif not searched then
      searched = true
      wide, rank = 4, nil
      fill('ZRANGEBYSCORE', PENDING, due, '+inf', 'WITHSCORES', 'LIMIT', 0, wide)
    elseif rank or #window < 2 * wide then
      return nil
    else
      -- behind the first few with this score
      rank = lower_bound(PENDING, due, prefix)
      fill('ZRANGE', PENDING, rank, rank + wide - 1, 'WITHSCORES')
      rank = rank + #window / 2
    end
  end
end

-- The same among held ones, whose tokens stand behind them.
local function look_held(due, prefix, kind)
  local rank, long, d = lower_bound(HELD, due, prefix), #prefix, tonumber(due)
  local some = call('ZRANGE', HELD, rank, rank + 3, 'WITHSCORES')
  for i = 1, #some, 2 do
    local m = sub(some[i], 1, -17)
    if tonumber(some[i + 1]) ~= d or sub(m, 1, long) ~= prefix then return nil end
    if parse(m) == kind then return m, some[i + 1], sub(some[i], -16) end
  end
end

local held = call('ZCARD', HELD) > 0
local n, bytes, most = 0, 0, tonumber(ARGV[7])
local members, scores, holders = {}, {}, {}
for i = FIRST, #ARGV, 4 do
  local due, kind, prefix = ARGV[i], sub(ARGV[i + 1], 1, 1), sub(ARGV[i + 1], 2)
  if kind == 'n' then prefix = char(#prefix) .. prefix end
  local m, score = look(due, prefix, kind)
  local holder
  if not m and held then m, score, holder = look_held(due, prefix, kind) end
  n = n + 1
  members[n], scores[n], holders[n] = m or '', score or '', holder or false
  bytes = bytes + #members[n]
  if bytes > most then break end
end

-- What the index says of them: their keys, and whether it counts them.
local keys, known = {}, {}
local ask, which, t = {}, {}, 0
local ids, payloads = {}, {}
if call('EXISTS', INDEX) == 1 then
  for i = 1, n do
    local kind, id, payload = parse(members[i])
    if kind == 'n' and #id == 8 then
      t = t + 1
      ask[t], which[t], ids[t], payloads[t] = 'i' .. id, i, id, payload
    end
  end
end
if t > 0 then
  local found = call('HMGET', INDEX, unpack(ask))
  local field, of, f = {}, {}, 0
  for j = 1, t do
    if found[j] then
      keys[which[j]], known[which[j]] = found[j], true
    else
      f = f + 1
      field[f], of[f] = payload_field(payloads[j]), j
    end
  end
  if f > 0 then
    local places = call('HMGET', INDEX, unpack(field))
    for k = 1, f do
      local j, place = of[k], places[k]
      if place == 't' then
        known[which[j]] = call('ZSCORE', TWINS,
          twin(field[k], six(tonumber(scores[which[j]])) .. ids[j])) ~= false
      elseif place then
        known[which[j]] = sub(place, 7) == ids[j]
      end
    end
  end
end

call('HINCRBY', FENCE, 'ver:' .. source, 1)
-- Rights that are needed later fail here.
call('ZREM', PENDING, NOTHING)
call('ZREM', HELD, NOTHING)
call('HDEL', HOLD, NOTHING)
local hset, zadd, zrem, freed, tokens, heads = {}, {}, {}, {}, {}, {}
local h, z, indexed = 0, 0, 0
for i = 1, n do
  local a = FIRST + 4 * (i - 1)
  local token, holder = ARGV[a + 2], holders[i]
  if members[i] ~= '' and holder ~= token then
    local count = known[i]
    if holder then
      local other = hold(holder)
      if other and holder ~= ARGV[a + 3] then
        tokens[i], heads[i] = holder, other.head
      else
        count = other and other.known
        freed[#freed + 1] = holder
        call('ZREM', HELD, members[i] .. holder)
      end
    else
      zrem[#zrem + 1] = members[i]
      if count then indexed = indexed - 1 end
    end
    if not tokens[i] then
      hset[h + 1] = token
      hset[h + 2] = record(source, ARGV[4], ARGV[5], ARGV[6], 'h', 0, scores[i], count and 1 or 0,
        members[i])
      zadd[h + 1], zadd[h + 2] = scores[i], members[i] .. token
      h = h + 2
    end
  end
end
if h > 0 then
  call('HSET', HOLD, unpack(hset))
  call('ZADD', HELD, unpack(zadd))
end
if #freed > 0 then call('HDEL', HOLD, unpack(freed)) end
if #zrem > 0 then call('ZREM', PENDING, unpack(zrem)) end
if indexed ~= 0 then call('HINCRBY', FENCE, 'indexed', indexed) end

local out = answer(OK, n)
local e = #out
for i = 1, n do
  out[e + 1], out[e + 2] = members[i], scores[i]
  out[e + 3] = keys[i] and '+' .. keys[i] or '-'
  out[e + 4], out[e + 5] = heads[i] or '', tokens[i] or ''
  e = e + 5
end
return out
