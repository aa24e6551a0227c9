-- range.lua: a page of pending tasks, held ones included, in order of (due, member). Writes nothing.
--
-- ARGV 1 source, 2 score and 3 member after which to go on ('' and '': from the
--   start), 4 most tasks, 5 most bytes, 6 '1': keys as well, 7 '1': the fence's
--   snapshots as well, 8 '1': only tasks with payload ARGV[9] that no index
--   entry names as keyed (dq_remove's search among unindexed tasks), 10 the id of
--   the asking operation, as for find.
-- Reply: common part, prev, cur, old, '1' at the end, last score, last member,
-- then score, member, kind ('n' new, 'o' old, 'x' unreadable), key ('-' keyless,
-- else '+'..key) of each task.
-- Others may come and go between pages: the cursor is a place in the order, not
-- a count. Cost: one pass over the page, O(log N) to find its start.
local source, limit, most = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
local wrong = types()
if wrong then return wrong end
local filter = ARGV[8] == '1'
local s = {}
if ARGV[7] == '1' then
  s = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source)
end

-- Pending tasks and held ones (still pending for everyone but their holders) are
-- two sets in the same order, read side by side.
local sets = {{PENDING, 0}}
if call('ZCARD', HELD) > 0 then sets[2] = {HELD, 16} end
for _, set in ipairs(sets) do
  set.rank, set.got, set.at = 0, {}, 1
  if ARGV[2] ~= '' then
    -- behind the cursor, whether it is still there or not
    local r = set[2] == 0 and call('ZRANK', PENDING, ARGV[3])
    if r and call('ZSCORE', PENDING, ARGV[3]) == ARGV[2] then
      set.rank = r + 1
    else
      local rank, stop = lower_bound(set[1], ARGV[2], ARGV[3])
      if rank < stop then
        local m = call('ZRANGE', set[1], rank, rank)[1]
        if sub(m, 1, #m - set[2]) == ARGV[3] then rank = rank + 1 end
      end
      set.rank = rank
    end
  end
end

local function read(set, n)
  local some = call('ZRANGE', set[1], set.rank, set.rank + n - 1, 'WITHSCORES')
  set.rank = set.rank + #some / 2
  set.ended = #some < 2 * n
  return some
end

-- The next of a set: member and score, or nil.
local function peek(set)
  if set.at > #set.got then
    if set.ended then return nil end
    set.got, set.at = read(set, 100), 1
    if #set.got == 0 then return nil end
  end
  local m = set.got[set.at]
  return sub(m, 1, #m - set[2]), set.got[set.at + 1]
end

-- The next n of all: member, score, member, score ...; and whether that was the end.
local function following(n)
  if not sets[2] then return read(sets[1], n), sets[1].ended end
  local some = {}
  for i = 1, 2 * n, 2 do
    local a, x = peek(sets[1])
    local b, y = peek(sets[2])
    local set = sets[1]
    if b and (not a or tonumber(y) < tonumber(x) or (x == y and before(b, a))) then
      set, a, x = sets[2], b, y
    end
    if not a then return some, true end
    set.at = set.at + 2
    some[i], some[i + 1] = a, x
  end
  return some, false
end

local out = reply(OK, source, s[1] or '', s[2] or '', s[3] or '', 1, ARGV[2], ARGV[3])
local o, bytes, got = #out, 0, 0
while got < limit do
  local want = limit - got
  if want > 100 then want = 100 end
  local some, ended = following(want)
  local kinds, ask, where, t = {}, {}, {}, 0
  local texts = {}
  for i = 1, #some, 2 do
    local kind, id, payload = parse(some[i])
    kinds[i] = kind or 'x'
    texts[i] = payload
    if kind == 'n' and #id == 8 and (ARGV[6] == '1' or filter) then
      t = t + 1
      ask[t], where[t] = 'i' .. id, i
    end
  end
  local keys = {}
  if t > 0 then
    local found = call('HMGET', INDEX, unpack(ask))
    for j = 1, t do if found[j] then keys[where[j]] = found[j] end end
  end
  for i = 1, #some, 2 do
    out[11], out[12] = some[i + 1], some[i]
    if not filter or (texts[i] == ARGV[9] and not keys[i] and not later(some[i], ARGV[10])) then
      out[o + 1], out[o + 2], out[o + 3] = some[i + 1], some[i], kinds[i]
      out[o + 4] = keys[i] and '+' .. keys[i] or '-'
      o = o + 4
      if filter then
        out[10] = 0
        return out
      end
    end
    bytes = bytes + #some[i]
  end
  got = got + #some / 2
  if ended then return out end
  if bytes > most then break end
end
out[10] = 0
return out
