package workload

// Every text of the agent workload is in this file and in tools, because the
// lab's vocabulary and training data are made of them. To change one is to
// change Version.

// The system prompt's part that all sessions share; the session's tag and its
// facts follow. At most 40 words, so that little of the lab's short context
// goes to it.
const (
	textSystem = "You work at a parcel desk. Answer each request with exactly one tool call. " +
		"Copy every value exactly as it was told: from the parcel list, an earlier call or a result. Your tag is "
	textSystemText = "You work at a parcel desk. Answer each request with exactly one line of JSON and nothing else, in one of these forms:\n" +
		`{"name":"ship","arguments":{"parcel":"PARCEL","carrier":"CARRIER","code":"CODE"}}` + "\n" +
		`{"name":"move","arguments":{"parcel":"PARCEL","dock":"DOCK"}}` + "\n" +
		`{"name":"confirm","arguments":{"receipt":"RECEIPT"}}` + "\n" +
		`{"name":"sign","arguments":{"parcel":"PARCEL","tag":"TAG"}}` + "\n" +
		"Copy every value exactly as it was told: from the parcel list, an earlier call or a result. Your tag is "
	textFact = "parcel %s: carrier %s, code %s, dock %s"
)

// textAsks are the phrasings of each request. "move" takes the second parcel's
// dock from its fact line, "follow" from the call that moved it last.
var textAsks = map[string][]string{
	"ship": {
		"Ship parcel %s with its carrier and code.",
		"Please ship parcel %s now.",
		"Parcel %s is ready: ship it.",
	},
	"move": {
		"Move parcel %s to the dock of parcel %s.",
		"Please move parcel %s to the dock of parcel %s.",
		"Parcel %s goes to the dock of parcel %s: move it.",
	},
	"follow": {
		"Move parcel %s to where parcel %s stands now.",
		"Please move parcel %s to where parcel %s stands now.",
		"Parcel %s goes to where parcel %s stands now: move it.",
	},
	"confirm": {
		"Confirm the receipt of parcel %s.",
		"Please confirm the receipt of parcel %s.",
		"Parcel %s has arrived: confirm its receipt.",
	},
	"sign": {
		"Sign for parcel %s with your tag.",
		"Please sign for parcel %s with your tag.",
		"Parcel %s needs your tag: sign for it.",
	},
}

// Results of tools. They hold only values of our own, so they need no escapes.
const (
	textShipped = `{"ok":true,"parcel":"%s","receipt":"%s"}`
	textMoved   = `{"ok":true,"parcel":"%s","dock":"%s"}`
	textDone    = `{"ok":true}`
	textFailed  = `{"ok":false,"error":"%s"}`
	textResult  = "Result: " // Tools Text: heads the user message

	errTool      = "no such tool"
	errArguments = "wrong arguments"
	errParcel    = "no such parcel"
	errCarrier   = "wrong carrier"
	errCode      = "wrong code"
	errShipped   = "already shipped"
	errDock      = "no such dock"
	errReceipt   = "no such receipt"
	errConfirmed = "already confirmed"
	errTag       = "wrong tag"
	errNoCall    = "no call found"
)

// textCallForm is a call as a line of JSON: name, arguments.
const textCallForm = `{"name":"%s","arguments":%s}`

// textCodeObject is a code as the JSON object that kind mixed asks for.
const textCodeObject = `{"code":"%s"}`
