package hypothesis

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
)

// Written is a hypothesis as a person writes it.
type Written struct {
	Name        string   `yaml:"name" json:"name"`
	Statement   string   `yaml:"statement" json:"statement"`
	Predictions []string `yaml:"predictions" json:"predictions"`
}

// Dir is where a case's directory has hypotheses in files.
const Dir = "hypotheses"

var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_.-]{0,63}$`)

// Check says what is wrong with a hypothesis, if anything, and returns its
// predictions.
func (w *Written) Check(s Subject) ([]*Prediction, error) {
	switch {
	case !nameForm.MatchString(w.Name):
		return nil, fmt.Errorf("hypothesis %q: its name is to be a few words such as stale-index-k: small letters, digits, - and _", w.Name)
	case strings.TrimSpace(w.Statement) == "":
		return nil, fmt.Errorf("hypothesis %s: has no statement: say in a sentence what is believed", w.Name)
	case len(w.Predictions) == 0:
		return nil, fmt.Errorf("hypothesis %s: predicts nothing, so that nothing could refute it", w.Name)
	}
	var list []*Prediction
	var errs []error
	for _, text := range w.Predictions {
		p, err := Parse(text, s)
		if err != nil {
			errs = append(errs, fmt.Errorf("hypothesis %s: %w", w.Name, err))
			continue
		}
		list = append(list, p)
	}
	return list, errors.Join(errs...)
}

// ReadFiles reads the hypotheses of a case's directory: each file is a list.
func ReadFiles(dir string) (list []Written, sources []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, Dir, "*.yaml"))
	if err != nil {
		return nil, nil, err
	}
	seen := map[string]string{}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, fmt.Errorf("read hypotheses: %w", err)
		}
		var here []Written
		err = yaml.NewDecoder(bytes.NewReader(b), yaml.Strict()).Decode(&here)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, nil, fmt.Errorf("read %s: want a list of name, statement and predictions: %s", path, yaml.FormatError(err, false, true))
		}
		for _, w := range here {
			if other, twice := seen[w.Name]; twice {
				return nil, nil, fmt.Errorf("read %s: hypothesis %q is in %s too", path, w.Name, other)
			}
			seen[w.Name] = path
			list, sources = append(list, w), append(sources, filepath.Join(Dir, filepath.Base(path)))
		}
	}
	return list, sources, nil
}
