// Package ledger keeps the hypotheses of a case with the evidence for and
// against them, in one SQLite file that several processes use at once. It only
// ever grows: a refuted hypothesis stays, with what refuted it. docs/ledger.md
// is the format. What predictions mean and how evidence judges them is package
// hypothesis.
//
// Stability: may change.
package ledger

import (
	"context"
	"database/sql"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite", in Go alone
)

// File is the ledger's name in a case's directory.
const File = "ledger.db"

// Hypothesis is a claim with predictions that evidence can refute.
type Hypothesis struct {
	ID          int64        `json:"id"`
	Name        string       `json:"name"`
	Statement   string       `json:"statement"`
	Source      string       `json:"source"` // who wrote it: a file, a person, an investigator
	Written     time.Time    `json:"written"`
	Predictions []Prediction `json:"predictions"`
}

// Prediction is something that evidence will show if the hypothesis is right.
type Prediction struct {
	ID   int64  `json:"id"`
	Text string `json:"text"`
}

// Evidence is one thing that was observed: a run, an attestation, a finding.
type Evidence struct {
	ID      int64           `json:"id"`
	Kind    string          `json:"kind"`
	Source  string          `json:"source"` // where it is; no source is entered twice
	Content json.RawMessage `json:"content"`
	Taken   time.Time       `json:"taken"`
}

// Verdict says what evidence made of a prediction.
type Verdict string

// The verdicts on a prediction. Rejected is of the evidence, not of the
// prediction: it was taken under another configuration, or doesn't count.
const (
	Supported Verdict = "supported"
	Refuted   Verdict = "refuted"
	Undecided Verdict = "undecided"
	Rejected  Verdict = "rejected"
)

// Judgement is where a prediction stands once a piece of evidence has come in,
// together with what came before it.
type Judgement struct {
	ID         int64     `json:"id"`
	Prediction int64     `json:"prediction_id"`
	Evidence   int64     `json:"evidence_id"`
	Verdict    Verdict   `json:"verdict"`
	Number     *float64  `json:"number"` // what was measured; nil when it isn't a number
	Error      float64   `json:"error"`  // bounds the chance that the verdict is wrong, whenever one looks
	Text       string    `json:"text"`
	Judged     time.Time `json:"judged"`
}

// Claim is what an investigator said; its hypothesis, if it made one.
type Claim struct {
	ID           int64           `json:"id"`
	Investigator string          `json:"investigator"`
	Statement    string          `json:"statement"`
	Hypothesis   int64           `json:"hypothesis_id,omitempty"` // 0 is none
	Content      json.RawMessage `json:"content"`
	Made         time.Time       `json:"made"`
}

// Ledger is an open ledger. It is safe for use by several goroutines.
type Ledger struct{ db *sql.DB }

//go:embed schema.sql
var schema string

// migrations lead from each version of the schema to the next, from nothing.
// One that was released never changes.
var migrations = []string{schema}

// application marks the file as ours: "clpt".
const application = 0x636c7074

// busyTimeout is how long a writer waits for another process's.
const busyTimeout = 20 * time.Second

// Open opens a ledger, makes it where there is none, and brings an older one up
// to date.
func Open(ctx context.Context, path string) (*Ledger, error) {
	return open(ctx, path, migrations)
}

// ErrNone says that there is no ledger.
var ErrNone = errors.New("there is no ledger")

// OpenExisting opens a ledger that is there.
func OpenExisting(ctx context.Context, path string) (*Ledger, error) {
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("open ledger %s: %w", path, ErrNone)
	}
	return Open(ctx, path)
}

func open(ctx context.Context, path string, migrations []string) (*Ledger, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	// Writers take their lock at the transaction's begin: one that has only read
	// so far can't wait for another, and fails at once.
	query := url.Values{
		"_txlock": {"immediate"},
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "journal_mode(wal)",
			"foreign_keys(on)", "synchronous(normal)", "trusted_schema(off)",
		},
	}
	name := url.URL{Scheme: "file", Path: filepath.ToSlash(absolute), RawQuery: query.Encode()}
	db, err := sql.Open("sqlite", name.String())
	if err != nil {
		return nil, fmt.Errorf("open ledger %s: %w", path, err)
	}
	l := &Ledger{db}
	if err := l.migrate(ctx, migrations); err != nil {
		db.Close() //nolint:errcheck // the other error is the one that matters
		return nil, fmt.Errorf("open ledger %s: %w", path, err)
	}
	return l, nil
}

// Close closes the ledger.
func (l *Ledger) Close() error { return l.db.Close() }

// migrate brings the schema up to date. Of several processes that try at once
// one does it.
func (l *Ledger) migrate(ctx context.Context, migrations []string) error {
	var version, id int
	err := errors.Join(
		l.db.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version),
		l.db.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id))
	if err != nil || version == len(migrations) && id == application {
		return err
	}
	return l.write(ctx, func(tx *sql.Tx) error {
		var tables int
		err := errors.Join(
			tx.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version),
			tx.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id),
			tx.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_master").Scan(&tables))
		switch {
		case err != nil:
			return err
		case tables > 0 && id != application:
			return errors.New("it is another program's database")
		case version > len(migrations):
			return fmt.Errorf("it was written by a newer culprit: its schema has version %d, and this one knows %d", version, len(migrations))
		}
		for _, step := range migrations[version:] {
			if _, err := tx.ExecContext(ctx, step); err != nil {
				return fmt.Errorf("migrate from version %d: %w", version, err)
			}
			version++
		}
		_, err = tx.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id = %d; PRAGMA user_version = %d", application, version))
		return err
	})
}

func (l *Ledger) write(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// DiffersError says that a hypothesis of that name is there and says something
// else.
type DiffersError struct{ Name string }

func (e *DiffersError) Error() string {
	return fmt.Sprintf("hypothesis %q: was written otherwise before, and the ledger keeps what was written: a changed hypothesis is a new one, so give it another name", e.Name)
}

// Add enters a hypothesis with its predictions. One that is there already stays
// as it is; added says whether it is new. A [DiffersError] says that another has
// its name.
func (l *Ledger) Add(ctx context.Context, h Hypothesis) (added bool, err error) {
	err = l.write(ctx, func(tx *sql.Tx) error {
		old, err := hypotheses(ctx, tx, "WHERE h.name = ?", h.Name)
		if err != nil {
			return err
		}
		if len(old) > 0 {
			same := slices.EqualFunc(old[0].Predictions, h.Predictions, func(a, b Prediction) bool { return a.Text == b.Text })
			if old[0].Statement != h.Statement || !same {
				return &DiffersError{h.Name}
			}
			return nil
		}
		id, err := insert(ctx, tx, "INSERT INTO hypothesis (name, statement, source, written_ms) VALUES (?, ?, ?, ?)",
			h.Name, h.Statement, h.Source, h.Written.UnixMilli())
		if err != nil {
			return err
		}
		for _, p := range h.Predictions {
			if _, err := insert(ctx, tx, "INSERT INTO prediction (hypothesis_id, text) VALUES (?, ?)", id, p.Text); err != nil {
				return err
			}
		}
		added = true
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("add hypothesis: %w", err)
	}
	return added, nil
}

// AddEvidence enters evidence, unless its source is there already; its id either
// way.
func (l *Ledger) AddEvidence(ctx context.Context, e Evidence) (id int64, added bool, err error) {
	err = l.write(ctx, func(tx *sql.Tx) error {
		err := tx.QueryRowContext(ctx, "SELECT id FROM evidence WHERE source = ?", e.Source).Scan(&id)
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		added = true
		id, err = insert(ctx, tx, "INSERT INTO evidence (kind, source, content, taken_ms) VALUES (?, ?, ?, ?)",
			e.Kind, e.Source, string(e.Content), e.Taken.UnixMilli())
		return err
	})
	if err != nil {
		return 0, false, fmt.Errorf("add evidence %s: %w", e.Source, err)
	}
	return id, added, nil
}

// Judge enters judgements. A prediction is judged once by each piece of
// evidence: the first judgement stays.
func (l *Ledger) Judge(ctx context.Context, judgements []Judgement) error {
	err := l.write(ctx, func(tx *sql.Tx) error {
		for _, j := range judgements {
			if _, err := tx.ExecContext(ctx,
				`INSERT INTO judgement (prediction_id, evidence_id, verdict, number, error, text, judged_ms)
				VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
				j.Prediction, j.Evidence, string(j.Verdict), j.Number, j.Error, j.Text, j.Judged.UnixMilli()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("add judgements: %w", err)
	}
	return nil
}

// AddClaim enters what an investigator said.
func (l *Ledger) AddClaim(ctx context.Context, c Claim) (id int64, err error) {
	err = l.write(ctx, func(tx *sql.Tx) error {
		id, err = insert(ctx, tx, "INSERT INTO claim (investigator, statement, hypothesis_id, content, made_ms) VALUES (?, ?, ?, ?, ?)",
			c.Investigator, c.Statement, sql.NullInt64{Int64: c.Hypothesis, Valid: c.Hypothesis != 0}, string(c.Content), c.Made.UnixMilli())
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("add claim: %w", err)
	}
	return id, nil
}

func insert(ctx context.Context, tx *sql.Tx, query string, args ...any) (int64, error) {
	r, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return r.LastInsertId()
}

// queryer is a database or a transaction.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// all reads every row of a query.
func all[T any](ctx context.Context, q queryer, scan func(*sql.Rows) (T, error), query string, args ...any) (list []T, err error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("read ledger: %w", err)
	}
	defer func() {
		if err = errors.Join(err, rows.Err(), rows.Close()); err != nil {
			err = fmt.Errorf("read ledger: %w", err)
		}
	}()
	for rows.Next() {
		item, err := scan(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, item)
	}
	return list, nil
}

func hypotheses(ctx context.Context, q queryer, where string, args ...any) ([]Hypothesis, error) {
	type row struct {
		h Hypothesis
		p Prediction
	}
	rows, err := all(ctx, q, func(r *sql.Rows) (row, error) {
		var x row
		var ms int64
		var id sql.NullInt64
		var text sql.NullString
		err := r.Scan(&x.h.ID, &x.h.Name, &x.h.Statement, &x.h.Source, &ms, &id, &text)
		x.h.Written, x.p = time.UnixMilli(ms), Prediction{id.Int64, text.String}
		return x, err
	}, `SELECT h.id, h.name, h.statement, h.source, h.written_ms, p.id, p.text
		FROM hypothesis h LEFT JOIN prediction p ON p.hypothesis_id = h.id `+where+` ORDER BY h.id, p.id`, args...)
	if err != nil {
		return nil, err
	}
	var list []Hypothesis
	for _, r := range rows {
		if len(list) == 0 || list[len(list)-1].ID != r.h.ID {
			list = append(list, r.h)
		}
		if last := &list[len(list)-1]; r.p.ID != 0 {
			last.Predictions = append(last.Predictions, r.p)
		}
	}
	return list, nil
}

// Hypotheses lists all, the oldest first.
func (l *Ledger) Hypotheses(ctx context.Context) ([]Hypothesis, error) {
	return hypotheses(ctx, l.db, "")
}

// Evidence lists all, in the order of entry.
func (l *Ledger) Evidence(ctx context.Context) ([]Evidence, error) {
	return all(ctx, l.db, func(r *sql.Rows) (Evidence, error) {
		var e Evidence
		var content string
		var ms int64
		err := r.Scan(&e.ID, &e.Kind, &e.Source, &content, &ms)
		e.Content, e.Taken = json.RawMessage(content), time.UnixMilli(ms)
		return e, err
	}, "SELECT id, kind, source, content, taken_ms FROM evidence ORDER BY id")
}

// Judgements lists all, in the order of entry.
func (l *Ledger) Judgements(ctx context.Context) ([]Judgement, error) {
	return all(ctx, l.db, func(r *sql.Rows) (Judgement, error) {
		var j Judgement
		var number sql.NullFloat64
		var ms int64
		err := r.Scan(&j.ID, &j.Prediction, &j.Evidence, &j.Verdict, &number, &j.Error, &j.Text, &ms)
		if number.Valid {
			j.Number = &number.Float64
		}
		j.Judged = time.UnixMilli(ms)
		return j, err
	}, "SELECT id, prediction_id, evidence_id, verdict, number, error, text, judged_ms FROM judgement ORDER BY id")
}

// Claims lists all, in the order of entry.
func (l *Ledger) Claims(ctx context.Context) ([]Claim, error) {
	return all(ctx, l.db, func(r *sql.Rows) (Claim, error) {
		var c Claim
		var content string
		var hypothesis sql.NullInt64
		var ms int64
		err := r.Scan(&c.ID, &c.Investigator, &c.Statement, &hypothesis, &content, &ms)
		c.Content, c.Hypothesis, c.Made = json.RawMessage(content), hypothesis.Int64, time.UnixMilli(ms)
		return c, err
	}, "SELECT id, investigator, statement, hypothesis_id, content, made_ms FROM claim ORDER BY id")
}
