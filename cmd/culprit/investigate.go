package main

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/culprit-project/culprit/internal/app"
)

type investigateCommand struct {
	ofCase    `embed:""`
	Command   map[string]string `placeholder:"NAME=PROGRAM" mapsep:"none" help:"An agent program that reads the brief on standard input. Repeatable."`
	Model     map[string]string `placeholder:"NAME=MODEL@URL" mapsep:"none" help:"A model behind an OpenAI-compatible URL, with tools that only read. Repeatable."`
	Source    []string          `type:"existingdir" sep:"none" placeholder:"DIR" help:"A directory of the deployed source, beside the attested packages. Repeatable."`
	Timeout   time.Duration     `default:"20m" placeholder:"D" help:"For each investigator (default: ${default})."`
	MaxCalls  int               `default:"30" placeholder:"N" help:"How often a model is asked at most (default: ${default})."`
	MaxTokens int               `default:"400000" placeholder:"N" help:"Tokens that a model may use in all (default: ${default})."`
	APIKey    string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"For the models; never written to a file, and no program sees it from here."`
	DryRun    bool              `help:"Print the brief, and ask nobody."`
}

func (c *investigateCommand) Run(ctx context.Context, s *streams) error {
	return app.Investigate(ctx, app.InvestigateOptions{
		HypothesisOptions: c.options(), Commands: c.Command, Models: c.Model, APIKey: c.APIKey, Env: programEnv(c.APIKey), Sources: c.Source,
		Timeout: c.Timeout, Calls: c.MaxCalls, Tokens: c.MaxTokens, DryRun: c.DryRun,
	}, c.output(s))
}

// programEnv is what agent programs get of the environment: their own keys, but
// not the one that was given for models.
func programEnv(key string) []string {
	var env []string
	for _, v := range os.Environ() {
		if _, value, _ := strings.Cut(v, "="); key == "" || value != key {
			env = append(env, v)
		}
	}
	return env
}
