package main

// labCommand is the reference server and what it is made from.
type labCommand struct {
	Serve  labServe  `cmd:"" help:"Serve a small real language model, OpenAI's API over HTTP."`
	Router labRouter `cmd:"" help:"Route requests to prefill and decode servers."`
	Faults labFaults `cmd:"" help:"List the lab's deliberate bugs and explain them."`
	Corpus labCorpus `cmd:"" hidden:"" help:"Write the token shards that the lab's model is trained on."`
}
