-- range.lua: a page of pending tasks, held ones included, in order of (due, member),
-- within ranges of due instants. Writes nothing.
--
-- ARGV 1 source, 2 letters: 'f' the fence's snapshots as well, 'k' keys as well, 'r'
--   the latest first, 's' long payloads are left out, 'p' search: only the first task
--   with payload ARGV[8] that no index entry names as keyed; 3 most tasks, 4 most
--   bytes, 5 the range to go on in (counted from 1), 6 score and 7 member behind which
--   to go on there ('' and '': from its beginning), 8 payload and 9 id of the asking
--   operation, of a search; 10 and more: the ranges in the order of reading, each as
--   two numbers, due > the first and due <= the second ('': no bound).
-- Reply: common part, prev, cur, old, range to go on in (0: that was all), score and
-- member behind which ('': from its beginning; '=': behind the last task of this
-- reply), then for each task score and member, with 'k' also key (nil: keyless). A long
-- member of which only the head is sent has after its score 'n' (new format), 'o'
-- (old), or 'x': nobody can read it.
-- Others may come and go between pages: the cursor is a place in the order, not
-- a count. Cost: one pass over the page, O(log N) to find its start.
local source, letters = ARGV[1], ARGV[2]
local wrong = types()
if wrong then return wrong end
local limit, most = tonumber(ARGV[3]), tonumber(ARGV[4])
local function asked(letter) return string.find(letters, letter, 1, true) ~= nil end
local keyed, back, cut, search = asked('k'), asked('r'), asked('s'), asked('p')
local s = {}
if asked('f') then
  s = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source)
end

-- Pending tasks and held ones (still pending for everyone but their holders) are
-- two sets in the same order, read side by side.
local sets = {{name = PENDING, tail = 0}}
if call('ZCARD', HELD) > 0 then sets[2] = {name = HELD, tail = 16} end

-- Rank of the first task of a set that is not before a place in the order; 1 behind it
-- if it is at the place.
local function place(set, score, member)
  if set.tail == 0 then
    local r = call('ZRANK', set.name, member)
    if r and call('ZSCORE', set.name, member) == score then return r, 1 end
  end
  local rank, stop = lower_bound(set.name, score, member)
  if rank < stop then
    local m = call('ZRANGE', set.name, rank, rank)[1]
    if sub(m, 1, #m - set.tail) == member then return rank, 1 end
  end
  return rank, 0
end

-- The ranks [from, to) of a range that are still to be read.
local function open(set, lo, hi, score, member)
  set.card = call('ZCARD', set.name)
  set.from = lo == '' and 0 or call('ZCOUNT', set.name, '-inf', lo)
  set.to = hi == '' and set.card or call('ZCOUNT', set.name, '-inf', hi)
  if score ~= '' then
    local rank, same = place(set, score, member)
    if back then
      if rank < set.to then set.to = rank end
    elseif rank + same > set.from then
      set.from = rank + same
    end
  end
  set.got, set.at = {}, 1
end

local function read(set, n)
  if set.to - set.from < n then n = set.to - set.from end
  if n <= 0 then return {} end
  if back then
    set.to = set.to - n
    return call('ZREVRANGE', set.name, set.card - set.to - n, set.card - set.to - 1, 'WITHSCORES')
  end
  set.from = set.from + n
  return call('ZRANGE', set.name, set.from - n, set.from - 1, 'WITHSCORES')
end

-- The next of a set: member and score, or nil.
local function peek(set)
  if set.at > #set.got then
    set.got, set.at = read(set, 50), 1
    if #set.got == 0 then return nil end
  end
  local m = set.got[set.at]
  return sub(m, 1, #m - set.tail), set.got[set.at + 1]
end

-- The next n of all, fewer at the end of the range: member, score, member, score ...
local function following(n)
  if not sets[2] then return read(sets[1], n) end
  local some = {}
  for i = 1, 2 * n, 2 do
    local a, x = peek(sets[1])
    local b, y = peek(sets[2])
    local set = sets[1]
    if b and a then
      local first = tonumber(y) < tonumber(x) or (x == y and before(b, a))
      if first ~= back then set, a, x = sets[2], b, y end
    elseif b then
      set, a, x = sets[2], b, y
    end
    if not a then break end
    set.at = set.at + 2
    some[i], some[i + 1] = a, x
  end
  return some
end

-- Are there keyed tasks at all? A keyed one has two entries in the index, a keyless one
-- has one there or among its twins.
local function any_keys()
  if call('EXISTS', TWINS) == 1 then return true end
  return call('HLEN', INDEX) > (tonumber(call('HGET', FENCE, 'indexed') or '0') or 0)
end

-- Keys of the tasks in a list, by their place in it.
local function keys_of(some)
  local ask, at, t, keys = {}, {}, 0, {}
  for i = 1, #some, 2 do
    local m = some[i]
    if byte(m, 1) == 8 and #m >= 9 + SIZE then
      t = t + 1
      ask[t], at[t] = 'i' .. sub(m, 2, 9), i
    end
  end
  if t > 0 then
    local found = call('HMGET', INDEX, unpack(ask))
    for j = 1, t do if found[j] then keys[at[j]] = found[j] end end
  end
  return keys
end

local look = (keyed or search) and any_keys()
local out = reply(OK, source, s[1] or '', s[2] or '', s[3] or '', 0, '', '')
local o, bytes, got = #out, 0, 0
-- where to go on: in the range that is opened next, and behind what was read of it
local from_score, from_member = ARGV[6], ARGV[7]
for r = tonumber(ARGV[5]), (#ARGV - 9) / 2 do
  local score, member = from_score, from_member
  for _, set in ipairs(sets) do
    open(set, ARGV[8 + 2 * r], ARGV[9 + 2 * r], score, member)
  end
  from_score, from_member = '', ''
  while true do
    if got >= limit or bytes >= most then
      out[10], out[11], out[12] = r, score, member
      return out
    end
    -- a few at first, then as many as should fit
    local want = 10
    if got > 0 then want = floor((most - bytes) * got / bytes) + 1 end
    if want > 500 then want = 500 end
    if want > limit - got then want = limit - got end
    local some = following(want)
    if #some == 0 then break end
    local keys = look and keys_of(some) or {}
    local last = #some - 1
    for i = 1, last, 2 do
      local m, x = some[i], some[i + 1]
      bytes = bytes + #m + 1
      if search then
        local kind, _, payload = parse(m)
        if kind and payload == ARGV[8] and not keys[i] and not later(m, ARGV[9]) then
          out[10], out[11] = r, '='
          out[o + 1], out[o + 2] = x, m
          return out
        end
      else
        if cut then m, x = headed(m, x) end
        out[o + 1], out[o + 2] = x, m
        o = o + 2
        if keyed then
          o = o + 1
          out[o] = keys[i] or false
        end
      end
    end
    got = got + #some / 2
    score, member = some[last + 1], some[last]
    -- not sent twice
    if not search and #out[keyed and o - 1 or o] == #member then score, member = '=', '' end
  end
end
return out
