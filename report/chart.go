package report

import (
	"fmt"
	"image"
	"image/color"
	"math"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Charts are gonum's plots on a canvas of our own: gonum's SVG has colours and
// styles in each mark, which the page's policy forbids and which would fit one
// ground only. The canvas keeps marks as data; the page's template writes them,
// so that their texts are escaped as all others are.

// chart is a drawing as the template shows it.
type chart struct {
	Class, Label string
	W, H         float64
	Marks        []mark
}

// mark is a path or a text.
type mark struct {
	Class       string
	Path        string // empty: Text at X, Y
	X, Y, Long  float64
	Text        string
	Href, Title string
}

// ink is a mark's colour: the class that the style colours, and where the mark
// leads.
type ink struct{ Class, Href, Title string }

// RGBA makes ink a [color.Color]; what it is in the end is the style's to say.
func (ink) RGBA() (r, g, b, a uint32) { return 0, 0, 0, math.MaxUint16 }

// canvas is a [vg.Canvas] whose y goes up, as gonum's does. Nothing here turns
// or scales, so it doesn't.
type canvas struct {
	chart
	ink   ink
	at    vg.Point
	saved []canvasState
}

type canvasState struct {
	ink ink
	at  vg.Point
}

func newCanvas(class, label string, w, h vg.Length) *canvas {
	return &canvas{chart: chart{Class: class, Label: label, W: w.Points(), H: h.Points()}}
}

func (c *canvas) area() draw.Canvas { return draw.NewCanvas(c, vg.Length(c.W), vg.Length(c.H)) }

func (c *canvas) SetLineWidth(vg.Length)             {}
func (c *canvas) SetLineDash([]vg.Length, vg.Length) {}
func (c *canvas) Rotate(float64)                     {}
func (c *canvas) Scale(_, _ float64)                 {}
func (c *canvas) DrawImage(vg.Rectangle, image.Image) {
}
func (c *canvas) Translate(by vg.Point) { c.at = c.at.Add(by) }
func (c *canvas) Push()                 { c.saved = append(c.saved, canvasState{c.ink, c.at}) }

func (c *canvas) Pop() {
	s := c.saved[len(c.saved)-1]
	c.saved, c.ink, c.at = c.saved[:len(c.saved)-1], s.ink, s.at
}

func (c *canvas) SetColor(to color.Color) {
	c.ink, _ = to.(ink)
}

func (c *canvas) Stroke(p vg.Path) { c.add("stroke ", p) }
func (c *canvas) Fill(p vg.Path)   { c.add("fill ", p) }

func (c *canvas) FillString(f font.Face, at vg.Point, text string) {
	x, y := c.place(at)
	// gonum has measured the text in a font that the reader may not have.
	c.Marks = append(c.Marks, mark{Class: c.ink.Class, X: x, Y: y, Long: round(f.Width(text).Points()), Text: text})
}

// add puts paths of one ink that lead nowhere into one mark.
func (c *canvas) add(how string, p vg.Path) {
	m := mark{Class: how + c.ink.Class, Path: c.path(p), Href: c.ink.Href, Title: c.ink.Title}
	if n := len(c.Marks); n > 0 && m.Href == "" && m.Title == "" {
		last := &c.Marks[n-1]
		if last.Class == m.Class && last.Path != "" && last.Href == "" && last.Title == "" {
			last.Path += m.Path
			return
		}
	}
	c.Marks = append(c.Marks, m)
}

func (c *canvas) place(p vg.Point) (x, y float64) {
	p = p.Add(c.at)
	return round(p.X.Points()), round(c.H - p.Y.Points())
}

// path writes a path in the language of SVG.
func (c *canvas) path(p vg.Path) string {
	var b strings.Builder
	number := func(values ...float64) {
		for _, v := range values {
			b.WriteByte(' ')
			b.WriteString(strconv.FormatFloat(round(v), 'f', -1, 64))
		}
	}
	for _, part := range p {
		x, y := c.place(part.Pos)
		switch part.Type {
		case vg.MoveComp:
			b.WriteByte('M')
			number(x, y)
		case vg.LineComp:
			b.WriteByte('L')
			number(x, y)
		case vg.ArcComp: // of gonum's glyphs, all whole circles
			r := part.Radius.Points()
			b.WriteByte('M')
			number(x-r, y)
			b.WriteByte('a')
			number(r, r, 0, 1, 0, 2*r, 0)
			b.WriteByte('a')
			number(r, r, 0, 1, 0, -2*r, 0)
		case vg.CurveComp: // none of our marks
		case vg.CloseComp:
			b.WriteByte('Z')
		}
	}
	return b.String()
}

func round(x float64) float64 { return math.Round(10*x) / 10 }

const (
	chartWidth    = 920
	chartFontSize = 11
)

// newPlot is a plot without axes' titles, in our inks.
func newPlot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Color, a.Tick.Color, a.Tick.Label.Color = ink{Class: "axis"}, ink{Class: "axis"}, ink{Class: "label"}
		a.Tick.Label.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: chartFontSize}
		a.Padding = 0
	}
	return p
}

// box is a bar over a stretch of x.
type box struct {
	From, To, Y, H float64
	ink
}

// boxes draws bars. gonum's have one colour and stand on whole numbers.
type boxes []box

// Plot makes boxes a [plot.Plotter].
func (s boxes) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, b := range s {
		from, to, low, high := x(b.From), max(x(b.To), x(b.From)+1), y(b.Y), y(b.Y+b.H)
		c.FillPolygon(b.ink, []vg.Point{{X: from, Y: low}, {X: to, Y: low}, {X: to, Y: high}, {X: from, Y: high}})
	}
}

// named ticks carry names.
func named(names []string, at func(i int) float64) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	for i, name := range names {
		ticks = append(ticks, plot.Tick{Value: at(i), Label: name})
	}
	return ticks
}

// labelled is gonum's choice of ticks, written otherwise.
func labelled(low, high float64, label func(float64) string) plot.ConstantTicks {
	ticks := plot.DefaultTicks{}.Ticks(low, high)
	for i := range ticks {
		if !ticks[i].IsMinor() {
			ticks[i].Label = label(ticks[i].Value)
		}
	}
	return ticks
}

// Whiskers of a table stand below one another, so they are drawn into one width.
const (
	whiskerWidth  = 190
	whiskerHeight = 16
	whiskerMargin = 14 // room for half a number of the scale
)

// newWhisker draws a rate with its interval on a scale from 0 to top.
func newWhisker(r *rateRow, top float64) chart {
	class := "fails"
	if r.failures == 0 {
		class = "clean"
	}
	c := newCanvas("whisker", fmt.Sprintf("%s, 95%% %s", r.Rate, r.Bounds), whiskerWidth, whiskerHeight)
	p := newPlot()
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, top, -1, 1
	at := plotter.XYs{{X: min(r.rate, top)}}
	bars := plotter.XErrorBars{
		XYs: at, XErrors: plotter.XErrors{{Low: max(at[0].X-r.low, 0), High: max(min(r.high, top)-at[0].X, 0)}},
		LineStyle: draw.LineStyle{Color: ink{Class: class}, Width: 2}, CapWidth: 5,
	}
	// What is clean is a ring, so that it doesn't take colours to tell.
	point := plotter.Scatter{XYs: at, GlyphStyle: draw.GlyphStyle{Color: ink{Class: class}, Radius: 4, Shape: draw.CircleGlyph{}}}
	if class == "clean" {
		point.Shape = draw.RingGlyph{}
	}
	// Into an area of our own: gonum's depends on the marks.
	area := draw.Crop(c.area(), whiskerMargin, -whiskerMargin, 0, 0)
	bars.Plot(area, p)
	point.Plot(area, p)
	return c.chart
}

// newScale is the head of a table's whiskers.
func newScale(top float64) chart {
	c := newCanvas("whisker scale", "from 0 to "+short(top), whiskerWidth, whiskerHeight)
	p := newPlot()
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, top, 0, 1
	var labels plotter.Labels
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XCenter, draw.YBottom
	area := draw.Crop(c.area(), whiskerMargin, -whiskerMargin, 0, 0)
	x, _ := p.Transforms(&area)
	for _, t := range (plot.DefaultTicks{}).Ticks(0, top) {
		if t.Value < 0 || t.Value > top*(1+1e-9) {
			continue
		}
		height := vg.Length(2)
		if !t.IsMinor() {
			height = 4
			labels.XYs = append(labels.XYs, plotter.XY{X: min(t.Value, top)})
			labels.Labels = append(labels.Labels, short(t.Value))
			labels.TextStyle = append(labels.TextStyle, style)
		}
		area.StrokeLine2(p.X.Tick.LineStyle, x(t.Value), 0, x(t.Value), height)
	}
	labels.Offset.Y = 5
	labels.Plot(area, p)
	return c.chart
}

// belief is a probability trial by trial.
type belief struct {
	Name   string
	Values []float64
}

// newBeliefs draws a band of bars for each, over the trials from first on.
func newBeliefs(first int, list []belief) chart {
	const band, gap = 26, 0.22 // height of a band, and the share of it that stays free
	last := first
	for _, b := range list {
		last = max(last, first+len(b.Values)-1)
	}
	names, ends := make([]string, len(list)), plotter.Labels{}
	p := newPlot()
	label := p.X.Tick.Label
	label.XAlign, label.YAlign = draw.XLeft, draw.YBottom
	var ground, bars boxes
	var told []string
	for i, b := range list {
		row := float64(len(list) - 1 - i)
		names[i] = clipped(b.Name)
		ground = append(ground, box{float64(first) - 0.5, float64(last) + 0.5, row, 1 - gap, ink{Class: "ground"}})
		for j, v := range b.Values {
			if v > 0.001 {
				n := first + j
				bars = append(bars, box{float64(n) - 0.43, float64(n) + 0.43, row, v * (1 - gap), ink{"bar", fmt.Sprintf("#trial%d", n), fmt.Sprintf("%s after trial %d: %s", b.Name, n, short(v))}})
			}
		}
		if n := len(b.Values); n > 0 {
			end := short(b.Values[n-1])
			ends.XYs = append(ends.XYs, plotter.XY{X: float64(last) + 0.5, Y: row})
			ends.Labels, ends.TextStyle = append(ends.Labels, end), append(ends.TextStyle, label)
			told = append(told, fmt.Sprintf("%s: from %s to %s", b.Name, short(b.Values[0]), end))
		}
	}
	ends.Offset = vg.Point{X: 6, Y: 5}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = float64(first)-0.5, float64(last)+0.5, 0, float64(len(list))
	p.X.Tick.Marker = wholeTicks{first, last}
	p.Y.Tick.Marker, p.Y.Tick.Length, p.Y.Width = named(names, func(i int) float64 { return float64(len(list)-1-i) + (1-gap)/2 }), 0, 0
	p.Y.Color, p.Y.Padding = ink{Class: "hidden"}, 6
	p.X.Label.Text, p.X.Label.TextStyle.Font, p.X.Label.TextStyle.Color = "trial", p.X.Tick.Label.Font, p.X.Tick.Label.Color
	p.Add(ground, bars)
	c := newCanvas("beliefs", strings.Join(told, "; "), chartWidth, vg.Length(band*len(list)+40))
	p.Add(&ends)
	p.Draw(c.area())
	return c.chart
}

// wholeTicks numbers trials, at most a dozen of them.
type wholeTicks struct{ first, last int }

// Ticks makes wholeTicks a [plot.Ticker].
func (w wholeTicks) Ticks(_, _ float64) []plot.Tick {
	step := 1
	for (w.last-w.first)/step > 12 {
		for _, by := range []int{2, 5, 10} {
			if (w.last-w.first)/(step*by) <= 12 || by == 10 {
				step *= by
				break
			}
		}
	}
	var ticks []plot.Tick
	for n := w.first; n <= w.last; n++ {
		if n == w.first || n%step == 0 && n-w.first >= (step+1)/2 {
			ticks = append(ticks, plot.Tick{Value: float64(n), Label: fmt.Sprint(n)})
		}
	}
	return ticks
}

// clipped bounds a name beside a chart; the table below it has all of it.
func clipped(name string) string {
	const most = 44
	if runes := []rune(name); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return name
}
