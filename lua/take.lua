-- take.lua: many exact tasks out of circulation, for an open transaction (PO 8 to 11):
-- what hold.lua does for one.
--
-- ARGV 1 session, 2 floor, 3 source, 4 incarnation, 5 xid, 6 subxid, 7 most bytes of
--   members; then of each task, best in the order in which they are pending: score;
--   token (16 bytes), token that may be taken over (16 bytes, spaces: none), and the
--   member's first bytes up to the end of the id.
-- Reply: common part, the fence's prev, its writer, and old, owner's source and place,
-- how many tasks were looked at (the bytes are the bound); then of each of them member
-- ('' not there) and '' (it is held now), 'k'..key (the same of a keyed one), or 'h',
-- token and record without body of another hold that stands.
-- Safe twice: under the same token it is the same hold. Cost: ~7 us a task.
local source = ARGV[3]
local wrong = types()
if wrong then return wrong end
local FIRST = 8
for i = FIRST, #ARGV, 2 do
  if not tonumber(ARGV[i]) or #(ARGV[i + 1] or '') < 33 then
    return redis.error_reply('ERR dq_bridge: no place of a task')
  end
end
local o = call('HMGET', OWNER, 'source', 'place')
local s = call('HMGET', FENCE, 'prev:' .. source, 'who:' .. source, 'old:' .. source, 'indexed')
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

local function fill(next, ...)
  window = call(...)
  rank = next and next + #window / 2
  at, hits = 1, 0
end

-- Is the task at this rank behind the place?
local function behind(r, d, prefix)
  local m = call('ZRANGE', PENDING, r, r, 'WITHSCORES')
  if not m[1] or tonumber(m[2]) > d then return true end
  return tonumber(m[2]) == d and not before(sub(m[1], 1, #prefix), prefix)
end

-- Go on from the end of the window, in strides, among tasks of the same due instant.
local function stride(d, prefix)
  local from, step = rank or call('ZRANK', PENDING, window[#window - 1]) + 1, 4
  while not behind(from + step - 1, d, prefix) do
    from = from + step
    step = step * 2
  end
  while step > 32 do
    step = step / 2
    if not behind(from + step - 1, d, prefix) then from = from + step end
  end
  fill(from, 'ZRANGE', PENDING, from, from + step - 1, 'WITHSCORES')
end

local function look(due, prefix)
  local d, long = tonumber(due), #prefix
  local searched, placed = false, false
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
          at, hits = at + 2, hits + 1
          return m, window[at - 1]
        end
        if before(prefix, p) then return nil end
      end
      at = at + 2
    end
    local n = #window
    if placed or (searched and n < 2 * wide) then return nil end
    if n > 0 and 2 * hits == n and not searched then
      local from = rank or call('ZRANK', PENDING, window[n - 1]) + 1
      if wide < 128 then wide = wide * 4 end
      fill(from, 'ZRANGE', PENDING, from, from + wide - 1, 'WITHSCORES')
    elseif n > 0 and tonumber(window[n]) == d then
      stride(d, prefix)
      placed = true
    else
      searched = true
      wide = 4
      fill(nil, 'ZRANGEBYSCORE', PENDING, due, '+inf', 'WITHSCORES', 'LIMIT', 0, wide)
    end
  end
end

-- The same among held ones, whose tokens stand behind them.
local function look_held(due, prefix)
  local at = lower_bound(HELD, due, prefix)
  local m = call('ZRANGE', HELD, at, at, 'WITHSCORES')
  if m[1] and tonumber(m[2]) == tonumber(due) and sub(m[1], 1, #prefix) == prefix then
    return sub(m[1], 1, -17), m[2], sub(m[1], -16)
  end
end

local held = call('ZCARD', HELD) > 0
local n, bytes, most = 0, 0, tonumber(ARGV[7])
local members, scores, holders, pending = {}, {}, {}, {}
for i = FIRST, #ARGV, 2 do
  local due, prefix = ARGV[i], sub(ARGV[i + 1], 33)
  local m, score = window[at], window[at + 1]
  n = n + 1
  if score == due and sub(m, 1, #prefix) == prefix then
    at, hits = at + 2, hits + 1
    last, last_prefix = tonumber(due), prefix
  else
    m, score = look(due, prefix)
  end
  if m then
    pending[#pending + 1] = m
  elseif held then
    m, score, holders[n] = look_held(due, prefix)
  end
  members[n], scores[n] = m or '', score
  bytes = bytes + #members[n]
  if bytes > most then break end
end

-- What the index says of them: their keys, and whether it counts them. If it counts
-- all that is pending it need not be asked of each.
local keys, known = {}, {}
local all = tonumber(s[4] or '0') == call('ZCARD', PENDING)
local ask, which, t = {}, {}, 0
if call('EXISTS', INDEX) == 1 then
  for i = 1, n do
    if byte(members[i], 1) == 8 then
      t = t + 1
      ask[t], which[t] = 'i' .. sub(members[i], 2, 9), i
    end
  end
end
if t > 0 then
  local found = call('HMGET', INDEX, unpack(ask))
  local field, of, f = {}, {}, 0
  for j = 1, t do
    local i = which[j]
    if found[j] then
      keys[i], known[i] = found[j], 1
    elseif all then
      known[i] = 1
    else
      local kind, _, payload = parse(members[i])
      if kind == 'n' then
        f = f + 1
        field[f], of[f] = payload_field(payload), i
      end
    end
  end
  if f > 0 then
    local places = call('HMGET', INDEX, unpack(field))
    for k = 1, f do
      local i, place = of[k], places[k]
      local id = sub(members[i], 2, 9)
      if place == 't' then
        if call('ZSCORE', TWINS, twin(field[k], six(tonumber(scores[i])) .. id)) then known[i] = 1 end
      elseif place and sub(place, 7) == id then
        known[i] = 1
      end
    end
  end
end

call('HINCRBY', FENCE, 'ver:' .. source, 1)
-- Rights that are needed later fail here.
call('ZREM', PENDING, NOTHING)
call('ZREM', HELD, NOTHING)
call('HDEL', HOLD, NOTHING)
call('ZREMRANGEBYRANK', PENDING, 1, 0)
local out = answer(OK, n)
local e = #out
local hset, zadd, freed = {}, {}, {}
local h, indexed = 0, 0
local head = record(source, ARGV[4], ARGV[5], ARGV[6], 'h', 0, '', '', '')
head = sub(head, 1, -3)
for i = 1, n do
  local m, what = members[i], ARGV[FIRST + 2 * i - 1]
  local token, holder = sub(what, 1, 16), holders[i]
  out[e + 1], out[e + 2] = m, keys[i] and 'k' .. keys[i] or ''
  e = e + 2
  if m ~= '' and holder ~= token then
    local count, take = known[i] or 0, true
    if holder then
      local other = hold(holder)
      if other and holder ~= sub(what, 17, 32) then
        out[e] = 'h' .. holder .. other.head
        take = false
      else
        count = other and other.known and 1 or 0
        freed[#freed + 1] = holder
        call('ZREM', HELD, m .. holder)
      end
    else
      indexed = indexed - count
    end
    if take then
      hset[h + 1], hset[h + 2] = token, head .. scores[i] .. '|' .. count .. '|' .. m
      zadd[h + 1], zadd[h + 2] = scores[i], m .. token
      h = h + 2
    end
  end
end
if h > 0 then
  call('HSET', HOLD, unpack(hset))
  call('ZADD', HELD, unpack(zadd))
end
if #freed > 0 then call('HDEL', HOLD, unpack(freed)) end
local p = #pending
if p > 0 then
  -- one after the other they go faster
  local from = p > 8 and call('ZRANK', PENDING, pending[1])
  if from and call('ZRANK', PENDING, pending[p]) == from + p - 1 then
    call('ZREMRANGEBYRANK', PENDING, from, from + p - 1)
  else
    call('ZREM', PENDING, unpack(pending))
  end
end
if indexed ~= 0 then call('HINCRBY', FENCE, 'indexed', indexed) end
return out
