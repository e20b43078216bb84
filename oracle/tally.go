package oracle

// Recorder takes what observers say and keeps count. Its memory is a few dozen
// bytes per op and a few examples per class, whatever the history's size.
type Recorder struct{}

// Trial says that an op could have shown these classes. An op is at most one
// trial of a class. op 0 is a sample that isn't about one op.
func (r *Recorder) Trial(op int64, classes ...Class) {}

// Violation says that a trial failed. The op must have been a trial of the
// class; several violations of one class by one op count once.
func (r *Recorder) Violation(v Violation) {}
