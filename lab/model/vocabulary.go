package model

import _ "embed" // the weights and the vocabulary

var (
	//go:embed weights/vocabulary.json
	vocabulary []byte
	//go:embed weights/model.safetensors
	weights []byte
)

// Vocabulary returns the tokenizer that the trained weights go with.
func Vocabulary() (*Tokenizer, error) { return ParseVocabulary(vocabulary) }

// Trained returns the model with the trained weights.
func Trained() (*Model, error) { return Load(weights) }
