package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// The program itself, driven by a client over its standard input and output.
func TestMCPOverStdio(t *testing.T) {
	program := filepath.Join(t.TempDir(), "culprit")
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(executable, program); err != nil {
		t.Skip(err)
	}
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "runs", "a"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "runs", "a", "plan.json"), []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	client := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil)
	c, err := client.Connect(t.Context(), &mcp.CommandTransport{Command: exec.Command(program, "mcp", root)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if name := c.InitializeResult().ServerInfo.Name; name != "culprit" {
		t.Errorf("the server is %q", name)
	}
	r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "list_runs", Arguments: map[string]any{"dir": "."}})
	if err != nil {
		t.Fatal(err)
	}
	if text := r.Content[0].(*mcp.TextContent).Text; r.IsError || !strings.Contains(text, "runs/a  not judged") {
		t.Errorf("list_runs: %s", text)
	}
}

// TestMCPPython uses the tools with the protocol's own Python client, from PyPI,
// over standard input and over HTTP. It is run by hand: make test-mcp.
func TestMCPPython(t *testing.T) {
	python := os.Getenv("CULPRIT_MCP_PYTHON")
	if python == "" {
		t.Skip("run by make test-mcp")
	}
	program := filepath.Join(t.TempDir(), "culprit")
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(executable, program); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := os.CopyFS(filepath.Join(root, "incident"), os.DirFS("../../examples/incident")); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(python, filepath.Join("testdata", "mcp", "client.py"), program, root).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
