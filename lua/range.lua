-- range.lua: a page of pending tasks in order of (due, member). Writes nothing.
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

local rank = 0
if ARGV[2] ~= '' then
  local r = call('ZRANK', PENDING, ARGV[3])
  if r and call('ZSCORE', PENDING, ARGV[3]) == ARGV[2] then
    rank = r + 1
  else
    rank = lower_bound(ARGV[2], ARGV[3])
  end
end

local out = reply(OK, source, s[1] or '', s[2] or '', s[3] or '', 1, ARGV[2], ARGV[3])
local o, bytes, got = #out, 0, 0
while got < limit do
  local want = limit - got
  if want > 100 then want = 100 end
  local some = call('ZRANGE', PENDING, rank, rank + want - 1, 'WITHSCORES')
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
  rank = rank + #some / 2
  if #some < 2 * want then return out end
  if bytes > most then break end
end
out[10] = 0
return out
