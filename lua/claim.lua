-- claim.lua: lends a numbered batch of due tasks to PostgreSQL, and lets go of the
-- batch before, which PostgreSQL has committed (PO 13, PO 14).
--
-- ARGV 1 session, 2 floor, 3 source, 4 now (ms), 5 number n of the last batch that
--   PostgreSQL has committed, 6 its nonce ('' none), 7 nonce for the next, 8 most tasks,
--   9 most bytes, 10 '1': a copy of batch n goes to the ready list, 11 places in batch n
--   that have none ('3,17'), 12 and 13: '' or number and nonce that were found here:
--   forget them, go on from n; 14 '1': lend nothing.
-- Reply: common part, answer, number and nonce that stand here, tasks let go,
--   quarantined, '1' if more may be due, then the lent tasks, each
--   'score|key length, - none|key, member'. Answer: 0 nothing is lent, 1 a batch (the
--   same as before if it was asked for before), 2 the numbers here are not
--   PostgreSQL's: nothing is written, except with 12 and 13.
-- CLAIM is a hash: num, nonce, prev (nonce of batch num - 1), n (tasks lent), low (the
-- earliest score of them), 1 .. n the tasks. Safe twice: the same number gives the same
-- tasks and nonce. Cost: ~10 us a task.
local source = ARGV[3]
local wrong = types() or typed(CLAIM, 'hash') or (ARGV[10] == '1' and typed(READY, 'list'))
if wrong then return wrong end
local function answer(status, ...) return reply(status, source, ...) end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return answer(no, 0, '0', '', 0, 0, 0) end
local _, open = fence(source)
if open ~= 1 then return answer(FROZEN, 0, '0', '', 0, 0, 0) end
if call('HGET', OWNER, 'source') ~= source then return answer(NOTOWNER, 0, '0', '', 0, 0, 0) end

local c = call('HMGET', CLAIM, 'num', 'nonce', 'prev', 'n')
local num, nonce, prev = c[1] or '0', c[2] or '', c[3] or ''
local count = tonumber(c[4] or '0') or 0
local n, known = ARGV[5], ARGV[6]
local next_num = digits(tonumber(n) + 1)

local function lent()
  local ask, tasks = {}, {}
  for i = 1, count do ask[i] = i end
  for i = 1, count, 500 do
    local some = call('HMGET', CLAIM, unpack(ask, i, i + 499 < count and i + 499 or count))
    for j = 1, #some do tasks[#tasks + 1] = some[j] end
  end
  return tasks
end

-- flat, and long: a reply cannot be unpacked from a table of any length
local function with(tasks, ...)
  local r = answer(...)
  for i = 1, #tasks do r[#r + 1] = tasks[i] end
  return r
end

local gone = 0
if ARGV[12] ~= '' then
  if num ~= ARGV[12] or nonce ~= ARGV[13] then return answer(OK, 2, num, nonce, 0, 0, 0) end
  if count > 0 and ARGV[14] ~= '1' then
    -- the same tasks under the next number: the asker knows which of them are done
    call('HINCRBY', FENCE, 'ver:' .. source, 1)
    call('HSET', CLAIM, 'num', next_num, 'nonce', ARGV[7], 'prev', known)
    return with(lent(), OK, 1, next_num, ARGV[7], 0, 0, 1)
  end
elseif num == next_num and prev == known and count > 0 then
  return with(lent(), OK, 1, num, nonce, 0, 0, 1)
elseif num ~= n or nonce ~= known then
  return answer(OK, 2, num, nonce, 0, 0, 0)
else
  gone = count
end

-- all of batch n is committed: what of it goes to the list
local copy = {}
if gone > 0 and ARGV[10] == '1' then
  local skip = {}
  for i in string.gmatch(ARGV[11], '%d+') do skip[tonumber(i)] = true end
  for i, task in ipairs(lent()) do
    local len, at = string.match(task, '^[^|]*|([^|]*)|()')
    local _, _, payload = parse(sub(task, at + (tonumber(len) or 0)))
    if payload and not skip[i] then copy[#copy + 1] = payload end
  end
end

-- the next page, read whole before anything is written
local page, score, bytes, full = {}, {}, 0, 0
local limit, most = tonumber(ARGV[8]), tonumber(ARGV[9])
if ARGV[14] ~= '1' then
  while #page < limit and bytes <= most do
    local want = limit - #page
    if want > 100 then want = 100 end
    local some = call('ZRANGEBYSCORE', PENDING, '-inf', ARGV[4], 'WITHSCORES', 'LIMIT', #page, want)
    for i = 1, #some, 2 do
      page[#page + 1], score[#score + 1] = some[i], some[i + 1]
      bytes = bytes + #some[i]
    end
    if #some < 2 * want then break end
  end
  if #page > 0 and (#page >= limit or bytes > most) then full = 1 end
end

local tasks, bad, low = {}, {}, ''
local ids, payloads, at = {}, {}, {}
for i = 1, #page do
  local kind, id, payload = parse(page[i])
  if not kind then
    bad[#bad + 1] = i
  else
    tasks[#tasks + 1] = i
    if low == '' then low = score[i] end
    if kind == 'n' and #id == 8 then
      ids[#ids + 1], payloads[#ids + 1], at[#ids + 1] = id, payload, i
    end
  end
end

-- what the index says of them
local keys, drop, twins, touched, indexed = {}, {}, {}, {}, 0
if #ids > 0 and call('EXISTS', INDEX) == 1 then
  local ask = {}
  for i = 1, #ids do ask[i] = 'i' .. ids[i] end
  local keyed = call('HMGET', INDEX, unpack(ask))
  for i = 1, #ids do ask[i] = keyed[i] and 'k' .. keyed[i] or payload_field(payloads[i]) end
  local places = call('HMGET', INDEX, unpack(ask))
  for i = 1, #ids do
    local place = places[i]
    if keyed[i] then
      keys[at[i]] = keyed[i]
      indexed = indexed + 1
      drop[#drop + 1] = 'i' .. ids[i]
    end
    if place == 't' and not keyed[i] then
      local w = twin(ask[i], six(tonumber(score[at[i]])) .. ids[i])
      if call('ZSCORE', TWINS, w) then
        indexed = indexed + 1
        twins[#twins + 1] = w
        touched[ask[i]] = true
      end
    elseif place and sub(place, 7) == ids[i] then
      if not keyed[i] then indexed = indexed + 1 end
      drop[#drop + 1] = ask[i]
    end
  end
end
if gone == 0 and #page == 0 and ARGV[12] == '' then return answer(OK, 0, num, nonce, 0, 0, 0) end

-- Rights that are needed later fail here, before the first write: empty removals.
call('ZREMRANGEBYRANK', PENDING, 1, 0)
call('HDEL', INDEX, NOTHING)
call('ZREM', TWINS, NOTHING)
if #bad > 0 then call('HDEL', BAD, NOTHING) end
call('HINCRBY', FENCE, 'ver:' .. source, 1)
for i = 1, #copy, 1000 do
  call('RPUSH', READY, unpack(copy, i, i + 999 < #copy and i + 999 or #copy))
end
call('DEL', CLAIM)
for _, i in ipairs(bad) do
  local _, why = parse(page[i])
  call('HSET', BAD, page[i], why .. '|' .. score[i] .. '|' .. ARGV[4])
end
local lend = {}
for k, i in ipairs(tasks) do
  local key = keys[i]
  lend[k] = score[i] .. '|' .. (key and #key or '-') .. '|' .. (key or '') .. page[i]
end
if #lend > 0 then
  local args = {'num', next_num, 'nonce', ARGV[7], 'prev', known, 'n', #lend, 'low', low}
  for k = 1, #lend do
    args[#args + 1] = k
    args[#args + 1] = lend[k]
    if #args >= 1000 or k == #lend then
      call('HSET', CLAIM, unpack(args))
      args = {}
    end
  end
else
  call('HSET', CLAIM, 'num', n, 'nonce', known, 'n', 0)
end
-- the page is the beginning of the set, by rank
if #page > 0 then call('ZREMRANGEBYRANK', PENDING, 0, #page - 1) end
for i = 1, #drop, 1000 do
  call('HDEL', INDEX, unpack(drop, i, i + 999 < #drop and i + 999 or #drop))
end
if #twins > 0 then
  call('ZREM', TWINS, unpack(twins))
  for field in pairs(touched) do
    if call('ZLEXCOUNT', TWINS, twin_range(field)) == 0 then call('HDEL', INDEX, field) end
  end
end
if indexed > 0 then call('HINCRBY', FENCE, 'indexed', -indexed) end
if #lend == 0 then return answer(OK, 0, n, known, gone, #bad, full) end
return with(lend, OK, 1, next_num, ARGV[7], gone, #bad, full)
