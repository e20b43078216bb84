package main

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	apps "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"github.com/culprit-project/culprit/internal/app"
)

// TestExampleCommands: the unit and the manifest start culprit with flags that
// it has.
func TestExampleCommands(t *testing.T) {
	read := func(name string) []byte {
		text, err := os.ReadFile("../../examples/watch/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	start := regexp.MustCompile(`(?m)^ExecStart=\S+ (.*)$`).FindSubmatch(read("culprit-watch.service"))
	if start == nil {
		t.Fatal("the unit has no ExecStart")
	}
	var d apps.Deployment
	if err := yaml.UnmarshalStrict(read("kubernetes.yaml"), &d); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"unit": strings.Fields(string(start[1])), "manifest": d.Spec.Template.Spec.Containers[0].Args,
	} {
		var c commands
		parser, err := kong.New(&c, kong.Vars(app.Defaults()), kong.Vars(labDefaults()), kong.BindTo(t.Context(), (*context.Context)(nil)))
		if err != nil {
			t.Fatal(err)
		}
		k, err := parser.Parse(args)
		if err != nil {
			t.Errorf("%s: culprit %s: %v", name, strings.Join(args, " "), err)
			continue
		}
		if k.Command() != "watch" || c.Watch.BaseURL == "" || c.Watch.Listen == "" {
			t.Errorf("%s starts culprit %s", name, strings.Join(args, " "))
		}
	}
}
