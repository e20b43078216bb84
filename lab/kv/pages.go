// Package kv keeps the books of the lab's cache memory: which page is free,
// who uses which, and which prefix is already there. It never looks at what
// the pages hold. Its API may change.
package kv

import (
	"fmt"
	"slices"
)

// Reserved is the page that belongs to nobody: slot 0, which padding rows
// write to, is in it.
const Reserved int32 = 0

// Pages counts the users of each page. A page is free when nobody uses it.
type Pages struct {
	// Lenient lets a page be given back that has no user, as servers do that
	// don't check; else that is a panic.
	Lenient bool

	users []int32 // by page
	free  []int32 // first in, first out, so that a page freed too early is reused late, as on real servers
}

// NewPages makes n pages, the reserved one included.
func NewPages(n int) *Pages {
	p := &Pages{users: make([]int32, n)}
	p.users[Reserved] = 1
	for page := int32(1); page < int32(n); page++ {
		p.free = append(p.free, page)
	}
	return p
}

// Total is the number of pages that can be used.
func (p *Pages) Total() int { return len(p.users) - 1 }

// Free is the number of pages that nobody uses.
func (p *Pages) Free() int { return len(p.free) }

// Users says how many use a page.
func (p *Pages) Users(page int32) int { return int(p.users[page]) }

// Alloc takes n free pages, each with one user; nil when there aren't so many.
func (p *Pages) Alloc(n int) []int32 {
	if n > len(p.free) {
		return nil
	}
	pages := slices.Clone(p.free[:n])
	p.free = slices.Delete(p.free, 0, n)
	for _, page := range pages {
		p.users[page] = 1
	}
	return pages
}

// Retain adds a user to each page.
func (p *Pages) Retain(pages ...int32) {
	for _, page := range pages {
		if p.users[page] == 0 {
			if p.Lenient {
				continue
			}
			panic(fmt.Sprintf("retain page %d, which is free", page))
		}
		p.users[page]++
	}
}

// Release takes a user from each page; the last one frees it.
func (p *Pages) Release(pages ...int32) {
	for _, page := range pages {
		if p.users[page] == 0 && p.Lenient {
			continue
		}
		if p.users[page] == 0 || page == Reserved {
			panic(fmt.Sprintf("release page %d, which has no user", page))
		}
		p.users[page]--
		if p.users[page] == 0 {
			p.free = append(p.free, page)
		}
	}
}

// Check compares the books with the page tables of all users, the tree's
// among them: free and used pages are all pages, no page is free twice, and
// each has as many users as tables name it.
func (p *Pages) Check(tables ...[]int32) error {
	counted := make([]int32, len(p.users))
	counted[Reserved] = 1
	for _, table := range tables {
		for _, page := range table {
			if page <= Reserved || int(page) >= len(p.users) {
				return fmt.Errorf("a table names page %d of %d", page, len(p.users))
			}
			counted[page]++
		}
	}
	free := make([]bool, len(p.users))
	for _, page := range p.free {
		if free[page] {
			return fmt.Errorf("page %d is free twice", page)
		}
		free[page] = true
	}
	for page := range p.users {
		switch {
		case p.users[page] != counted[page]:
			return fmt.Errorf("page %d has %d users by the books and %d by the tables", page, p.users[page], counted[page])
		case free[page] != (counted[page] == 0):
			return fmt.Errorf("page %d has %d users and free is %t", page, counted[page], free[page])
		}
	}
	return nil
}
