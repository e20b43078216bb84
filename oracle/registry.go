package oracle

// Registry is every oracle, in the order in which reports show them.
var Registry = []Oracle{
	ToolCall,
	Canary,
	Schema,
	Script,
	Run,
	Loop,
	Special,
	Empty,
	Echo,
	Recall,
	Integrity,
	Wedge,
	Poison,
	Path,
	Greedy,
}
