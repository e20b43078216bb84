-- Version 1. docs/ledger.md explains it. Times are milliseconds since 1970.

CREATE TABLE hypothesis (
	id         INTEGER PRIMARY KEY,
	name       TEXT NOT NULL UNIQUE,
	statement  TEXT NOT NULL,
	source     TEXT NOT NULL,
	written_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE prediction (
	id            INTEGER PRIMARY KEY,
	hypothesis_id INTEGER NOT NULL REFERENCES hypothesis (id),
	text          TEXT NOT NULL,
	UNIQUE (hypothesis_id, text)
) STRICT;

CREATE TABLE evidence (
	id       INTEGER PRIMARY KEY,
	kind     TEXT NOT NULL,
	source   TEXT NOT NULL UNIQUE,
	content  TEXT NOT NULL CHECK (json_valid(content)),
	taken_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE judgement (
	id            INTEGER PRIMARY KEY,
	prediction_id INTEGER NOT NULL REFERENCES prediction (id),
	evidence_id   INTEGER NOT NULL REFERENCES evidence (id),
	verdict       TEXT NOT NULL CHECK (verdict IN ('supported', 'refuted', 'undecided', 'rejected')),
	number        REAL,
	error         REAL NOT NULL CHECK (error >= 0 AND error <= 1),
	text          TEXT NOT NULL,
	judged_ms     INTEGER NOT NULL,
	UNIQUE (prediction_id, evidence_id)
) STRICT;

CREATE TABLE claim (
	id            INTEGER PRIMARY KEY,
	investigator  TEXT NOT NULL,
	statement     TEXT NOT NULL,
	hypothesis_id INTEGER REFERENCES hypothesis (id),
	content       TEXT NOT NULL CHECK (json_valid(content)),
	made_ms       INTEGER NOT NULL
) STRICT;

-- What is in the ledger stays as it is.
CREATE TRIGGER hypothesis_kept BEFORE DELETE ON hypothesis BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER hypothesis_same BEFORE UPDATE ON hypothesis BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER prediction_kept BEFORE DELETE ON prediction BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER prediction_same BEFORE UPDATE ON prediction BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER evidence_kept BEFORE DELETE ON evidence BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER evidence_same BEFORE UPDATE ON evidence BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER judgement_kept BEFORE DELETE ON judgement BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER judgement_same BEFORE UPDATE ON judgement BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER claim_kept BEFORE DELETE ON claim BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
CREATE TRIGGER claim_same BEFORE UPDATE ON claim BEGIN SELECT RAISE(ABORT, 'the ledger keeps everything'); END;
