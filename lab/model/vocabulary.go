package model

import _ "embed" // the vocabulary file

//go:embed weights/vocabulary.json
var vocabulary []byte

// Vocabulary returns the tokenizer that the trained weights go with.
func Vocabulary() (*Tokenizer, error) { return ParseVocabulary(vocabulary) }
