package culprit

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/culprit-project/culprit/"

// layers is the architecture: a package imports only from rows above its own.
var layers = [][]string{
	{"openai", "history", "stats", "design", "ledger", "deploy", "queue", "lab/fault", "lab/graph", "internal/term", "internal/nearest"},
	{"workload", "shrink", "oracle", "queue/natstest", "target", "probe", "search", "lab/kv", "lab/model"},
	{"load", "record", "replay", "watch", "suspect", "amplify", "lab/host", "lab/sched", "hypothesis"},
	{"experiment", "investigate", "lab/disagg"},
	{"report", "bundle", "worker", "lab"},
	{"internal/app", "lab/api"},
	{"internal/mcp"},
	{"cmd/culprit"},
}

// banned lists what a package must not reach, even through others.
var banned = []struct{ pkg, dep, why string }{
	{"oracle", "net/http", "a verdict can be recomputed from a stored history"},
	{"workload", "net/http", "what is sent is pure"},
	{"search", "os/exec", "the search is tested without servers"},
	{"internal/app", module + "lab", "the tester shares no code with the server it judges"},
}

func TestLayers(t *testing.T) {
	imports := readImports(t)
	rank := map[string]int{}
	for i, row := range layers {
		for _, p := range row {
			rank[module+p] = i
			if imports[module+p] == nil {
				t.Errorf("layers names %s, which does not exist", p)
			}
		}
	}
	for pkg, deps := range imports {
		mine, placed := rank[pkg]
		if !placed {
			t.Errorf("%s has no place in layers", pkg)
		}
		for dep := range deps {
			if theirs, ok := rank[dep]; ok && theirs >= mine {
				t.Errorf("%s imports %s, which is not above it", pkg, dep)
			}
			lab := strings.HasPrefix(strings.TrimPrefix(pkg, module), "lab")
			if lab && strings.HasPrefix(dep, module) && !strings.HasPrefix(dep, module+"lab") && dep != module+"openai" {
				t.Errorf("%s imports %s: the lab imports nothing of ours but openai", pkg, dep)
			}
		}
	}
	for _, b := range banned {
		for dep := range reach(imports, module+b.pkg, map[string]bool{}) {
			if dep == b.dep || strings.HasPrefix(dep, b.dep+"/") {
				t.Errorf("%s reaches %s: %s", b.pkg, dep, b.why)
			}
		}
	}
}

// readImports parses the import clauses itself: the files it opens then enter
// the test cache's key, which a call to "go list" would not.
func readImports(t *testing.T) map[string]map[string]bool {
	t.Helper()
	imports := map[string]map[string]bool{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "examples") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		pkg := module + filepath.ToSlash(filepath.Dir(path))
		if imports[pkg] == nil {
			imports[pkg] = map[string]bool{}
		}
		for _, spec := range f.Imports {
			dep, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			imports[pkg][dep] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return imports
}

func reach(imports map[string]map[string]bool, pkg string, seen map[string]bool) map[string]bool {
	for dep := range imports[pkg] {
		if !seen[dep] {
			seen[dep] = true
			reach(imports, dep, seen)
		}
	}
	return seen
}
