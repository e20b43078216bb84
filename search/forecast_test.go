package search

import "testing"

func TestForeseeRarerIsDearer(t *testing.T) {
	o := Options{Seed: 1, Batch: 40, LaunchCost: 20}
	often, err := Foresee(8, 0.2, o, 8)
	if err != nil {
		t.Fatal(err)
	}
	rarely, err := Foresee(8, 0.02, o, 8)
	if err != nil {
		t.Fatal(err)
	}
	if often.Launches[0] < 4 || often.Launches[1] < often.Launches[0] || often.Requests[0] < 8*40 {
		t.Errorf("a hunt is foreseen to take %+v", often)
	}
	if rarely.Requests[0] <= often.Requests[0] || rarely.Requests[1] <= often.Requests[1] {
		t.Errorf("rare failures are foreseen to take %+v, frequent ones %+v", rarely, often)
	}
	if again, _ := Foresee(8, 0.2, o, 8); again != often {
		t.Errorf("the same options foresee %+v and %+v", often, again)
	}
}
