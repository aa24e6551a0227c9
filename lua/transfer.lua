-- transfer.lua: a page of due tasks from the pending set to the ready list.
--
-- ARGV 1 session, 2 floor, 3 source, 4 now (ms), 5 most tasks of a page,
--   6 most payload bytes of a page.
-- Reply: common part, moved, quarantined, due of the first one ('' none), holds,
-- '1' if more may be due.
-- The page is read and unpacked whole before anything is written: one member
-- that cannot be read goes to quarantine and stands in nobody's way. Safe twice.
-- Cost: ~8 us a task.
local source = ARGV[3]
local wrong = types() or typed(READY, 'list')
if wrong then return wrong end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return reply(no, source, 0, 0, '', 0, 0) end
local _, open = fence(source)
if open ~= 1 then return reply(FROZEN, source, 0, 0, '', 0, 0) end
if call('HGET', OWNER, 'source') ~= source then return reply(NOTOWNER, source, 0, 0, '', 0, 0) end

local now, limit, most = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local oldest = head()
local page, bytes, full = {}, 0, 0
while #page < limit do
  local want = limit - #page
  if want > 100 then want = 100 end
  local some = call('ZRANGEBYSCORE', PENDING, '-inf', now, 'LIMIT', #page, want)
  for i = 1, #some do
    page[#page + 1] = some[i]
    bytes = bytes + #some[i]
  end
  if #some < want then break end
  if bytes > most then break end
end
local n = #page
if n == 0 then return reply(OK, source, 0, 0, '', held_count(), 0) end
if n >= limit or bytes > most then full = 1 end

local push, bad, ids, payloads, at = {}, {}, {}, {}, {}
local p, t = 0, 0
for i = 1, n do
  local kind, id, payload = parse(page[i])
  if kind then
    p = p + 1
    push[p] = payload
    if kind == 'n' and #id == 8 then
      t = t + 1
      ids[t], payloads[t], at[t] = id, payload, i
    end
  else
    bad[#bad + 1] = page[i]
  end
end

-- what the index says of them, read before anything is written
local drop, drop_twins, touched, known = {}, {}, {}, 0
if t > 0 and call('EXISTS', INDEX) == 1 then
  local ask = {}
  for i = 1, t do ask[i] = 'i' .. ids[i] end
  local keyed = call('HMGET', INDEX, unpack(ask))
  for i = 1, t do
    if keyed[i] then ask[i] = 'k' .. keyed[i] else ask[i] = payload_field(payloads[i]) end
  end
  local places = call('HMGET', INDEX, unpack(ask))
  local d = 0
  for i = 1, t do
    local place = places[i]
    if keyed[i] then
      known = known + 1
      drop[d + 1] = 'i' .. ids[i]
      d = d + 1
      if place and sub(place, 7) == ids[i] then
        drop[d + 1] = ask[i]
        d = d + 1
      end
    elseif place == 't' then
      local due = call('ZSCORE', PENDING, page[at[i]])
      local w = twin(ask[i], six(tonumber(due)) .. ids[i])
      if call('ZSCORE', TWINS, w) then
        known = known + 1
        drop_twins[#drop_twins + 1] = w
        touched[ask[i]] = true
      end
    elseif place and sub(place, 7) == ids[i] then
      known = known + 1
      drop[d + 1] = ask[i]
      d = d + 1
    end
  end
end

-- Rights that are needed after the push fail here, before it: empty removals.
call('ZREMRANGEBYRANK', PENDING, 1, 0)
call('HDEL', INDEX, NOTHING)
call('ZREM', TWINS, NOTHING)
call('HINCRBY', FENCE, 'ver:' .. source, 1)
for _, m in ipairs(bad) do
  local _, why = parse(m)
  call('HSET', BAD, m, why .. '|' .. call('ZSCORE', PENDING, m) .. '|' .. now)
end
for i = 1, p, 1000 do
  local e = i + 999
  if e > p then e = p end
  call('RPUSH', READY, unpack(push, i, e))
end
-- the page is the beginning of the set, by rank
call('ZREMRANGEBYRANK', PENDING, 0, n - 1)
if #drop > 0 then call('HDEL', INDEX, unpack(drop)) end
if #drop_twins > 0 then
  call('ZREM', TWINS, unpack(drop_twins))
  for field in pairs(touched) do
    if call('ZLEXCOUNT', TWINS, twin_range(field)) == 0 then call('HDEL', INDEX, field) end
  end
end
if known > 0 then call('HINCRBY', FENCE, 'indexed', -known) end
return reply(OK, source, p, #bad, oldest, held_count(), full)
