package main

import (
	"context"
	"os/user"

	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/internal/app"
)

// ledgerCommands are those on what is believed of a case.
type ledgerCommands struct {
	Hypothesis  hypothesisCommand  `cmd:"" help:"What is believed of a case, with predictions that evidence judges."`
	Bundle      bundleCommand      `cmd:"" help:"What a maintainer needs: verdict, stand-alone repro, history, configuration, logs."`
	MCP         mcpCommand         `cmd:"" name:"mcp" help:"The same as tools for an agent, by the Model Context Protocol."`
	Investigate investigateCommand `cmd:"" help:"Ask agents and models what may be the cause; their claims are checked against the deployed source."`
}

type hypothesisCommand struct {
	Add   hypothesisAdd   `cmd:"" help:"Write a hypothesis down, with its predictions; what is known already judges it at once."`
	List  hypothesisList  `cmd:"" help:"Where every hypothesis stands."`
	Show  hypothesisShow  `cmd:"" help:"One hypothesis with all its evidence."`
	Next  hypothesisNext  `cmd:"" help:"The experiment that would tell most, and what its outcomes would mean."`
	Judge hypothesisJudge `cmd:"" help:"Take in runs and attestations that no hunt made, as evidence."`
}

// ofCase is what all commands on hypotheses take.
type ofCase struct {
	Case string `arg:"" type:"path" help:"A case.yaml, or the directory that it is in."`
	Dir  string `name:"trials" type:"path" placeholder:"DIR" help:"Where the hunt's trials are (default: the case's directory)."`
	formatFlag
}

func (c *ofCase) options() app.HypothesisOptions {
	return app.HypothesisOptions{Case: c.Case, Dir: c.Dir}
}

type hypothesisAdd struct {
	ofCase    `embed:""`
	Name      string   `required:"" placeholder:"NAME" help:"A few words: stale-index-k."`
	Statement string   `required:"" placeholder:"TEXT" help:"What is believed, in a sentence."`
	Predict   []string `required:"" sep:"none" placeholder:"PREDICTION" help:"What will be seen if it is so: rate(graph=safe) < 0.01. Repeatable."`
	By        string   `placeholder:"WHO" help:"Who says so (default: the user's name)."`
}

func (c *hypothesisAdd) Run(ctx context.Context, s *streams) error {
	if c.By == "" {
		c.By = "somebody"
		if u, err := user.Current(); err == nil && u.Username != "" {
			c.By = u.Username
		}
	}
	return app.AddHypothesis(ctx, c.options(), hypothesis.Written{Name: c.Name, Statement: c.Statement, Predictions: c.Predict}, c.By, c.output(s))
}

type hypothesisList struct {
	ofCase `embed:""`
}

func (c *hypothesisList) Run(ctx context.Context, s *streams) error {
	return app.ListHypotheses(ctx, c.options(), c.output(s))
}

type hypothesisShow struct {
	ofCase `embed:""`
	Name   string `arg:"" help:"Which."`
}

func (c *hypothesisShow) Run(ctx context.Context, s *streams) error {
	return app.ShowHypothesis(ctx, c.options(), c.Name, c.output(s))
}

type hypothesisNext struct {
	ofCase `embed:""`
}

func (c *hypothesisNext) Run(ctx context.Context, s *streams) error {
	return app.NextExperiment(ctx, c.options(), c.output(s))
}

type hypothesisJudge struct {
	ofCase `embed:""`
	What   []string `arg:"" type:"path" help:"Run directories, or files that culprit attest -o wrote."`
}

func (c *hypothesisJudge) Run(ctx context.Context, s *streams) error {
	return app.JudgeEvidence(ctx, c.options(), c.What, c.output(s))
}
