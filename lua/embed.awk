# embed.awk: turns lua/*.lua into src/redis/scripts_text.h
#
# One C string per script, dq_lua_<name>, and dq_lua_lib, which
# src/redis/scripts.c puts before each of them. Indentation, empty lines and
# lines that hold nothing but a comment are left out: the text travels to every
# server. Comments behind code stay. Each line is a literal of its own, so that no
# literal is longer than ISO C allows.

function fail(why) {
	print FILENAME ":" FNR ": " why > "/dev/stderr"
	failed = 1
	exit 1
}

function finish() {
	if (name != "")
		print "\t\"\";\n"
}

BEGIN {
	print "/* made from lua/ by lua/embed.awk, not to be edited */"
	print "#ifndef DQ_SCRIPTS_TEXT_H"
	print "#define DQ_SCRIPTS_TEXT_H\n"
}

FNR == 1 {
	if (comment)
		fail("the file before ends inside a comment")
	finish()
	name = FILENAME
	sub(/^.*\//, "", name)
	sub(/\.lua$/, "", name)
	if (name !~ /^[a-z][a-z_]*$/)
		fail("a script's name is made of small letters")
	print "static const char dq_lua_" name "[] ="
	lib = lib || name == "lib"
}

{
	sub(/\r$/, "")
	sub(/^[ \t]+/, "")
	sub(/[ \t]+$/, "")
}

# --[[ ... ]] over several lines
comment {
	if ($0 ~ /\]\]$/)
		comment = 0
	next
}
/^--\[\[/ {
	if ($0 !~ /\]\]$/)
		comment = 1
	next
}

/^$/ || /^--/ { next }

# their lines would lose their indentation
/\[=*\[/ { fail("long strings are not supported") }

{
	gsub(/\\/, "&&")
	gsub(/"/, "\\\"")
	gsub(/\?/, "\\?")			# no trigraphs
	gsub(/\t/, "\\t")
	print "\t\"" $0 "\\n\""
}

END {
	if (failed)
		exit 1
	if (comment)
		fail("the file ends inside a comment")
	finish()
	if (!lib)
		print "static const char dq_lua_lib[] = \"\";\n"
	print "#endif\t\t\t\t\t\t\t/* DQ_SCRIPTS_TEXT_H */"
}
