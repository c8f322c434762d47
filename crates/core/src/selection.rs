//! Which tokens a row's filters keep, from a summary of one pass.
//!
//! Filters look at a row in the order of falling logits ([`Place`]), and what they keep is one run of that order. A pass
//! leaves the first places as a list, and the whole row as a [`MassHistogram`]; [`Selector::select`] walks the filters
//! over these two. Where the run ends inside the list the kept set is known. Where it ends below the list at a known
//! logit, or where a [`Frontier`] point can be placed by the histogram alone, the winner is known. What remains is
//! answered by the logit down to which a second pass must list the row, and with that list the same walk ends inside it.
//!
//! Masses are the integers of the histogram, summed bin by bin from the top, so the answer is a function of the row's
//! logits alone: the same for any tiles, threads, shards or backend, and whether or not a second pass was needed. It is
//! the set that exact arithmetic gives, except where a cumulative mass meets its limit to within 2^-28 of the row's
//! mass, or a deviation its value to within 2^-12 nat.

use crate::filters::{Filter, Filters};
use crate::frontier::Frontier;
use crate::mass_histogram::{MassHistogram, edge_of};
use crate::moments::Moments;
use crate::winner::{Candidate, Place};
use core::ops::Range;

/// A run of the order of falling logits, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// The first place.
    pub first: Place,
    /// The last place.
    pub last: Place,
}

impl Band {
    /// Every token with a finite logit.
    pub const ALL: Band =
        Band { first: Place { logit: f32::INFINITY, token: 0 }, last: Place { logit: f32::MIN, token: u32::MAX } };

    /// Whether a token is in the band.
    #[inline(always)]
    pub fn contains(&self, place: Place) -> bool {
        self.first.reaches(&place) && place.reaches(&self.last)
    }
}

/// What is known of a row.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The first tokens in the order of falling logits; not empty.
    pub list: &'a [Candidate],
    /// Every token with a logit of at least this is in the list; -inf when the list holds the whole row.
    pub floor: f32,
    /// The masses of the whole row, where [`Filters::need_mass`].
    pub mass: &'a MassHistogram,
    /// The moments of the whole row, where [`Filters::need_moments`].
    pub moments: &'a Moments,
}

impl<'a> Seen<'a> {
    /// The list of a row's first `limit` tokens: it holds the whole row when it is shorter than that.
    pub fn first(list: &'a [Candidate], limit: usize, mass: &'a MassHistogram, moments: &'a Moments) -> Self {
        let floor = match list.last() {
            Some(last) if list.len() >= limit => last.logit.next_up(),
            _ => f32::NEG_INFINITY,
        };
        Seen { list, floor, mass, moments }
    }
}

/// What the filters keep.
#[derive(Clone, Debug, PartialEq)]
pub enum Selection {
    /// These entries of the list.
    Listed(Range<usize>),
    /// These tokens, more than the list has.
    Band(Band),
    /// The first tokens until their mass reaches a limit, more than the list has; the histogram tells for most tokens
    /// whether they are kept.
    Prefix,
    /// A list of every token with a logit of at least `floor` will tell.
    Unlisted {
        /// In nats.
        floor: f32,
    },
}

/// One bin of the histogram, relative to the highest.
#[derive(Clone, Copy, Debug)]
struct Cell {
    edge: f32,
    /// `e^(edge - top)` a unit of mass.
    weight: f64,
    mass: u64,
}

/// Where the run of kept tokens ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Before this entry of the list.
    At(usize),
    /// With the last token of at least this logit, which is below the list.
    Above(f32),
    /// With the row.
    All,
}

/// The walk of a row's filters. Keeps its memory from row to row.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    cells: Vec<Cell>,
    /// The highest edge.
    top: f32,
    /// The first kept entry of the list.
    from: usize,
    /// The limits between which a prefix's mass ends; the smallest logit that it may hold.
    limits: (f64, f64),
    prefix_floor: f32,
}

/// A logit that is not reached by anything.
const NEVER: Selection = Selection::Unlisted { floor: f32::NEG_INFINITY };

/// The smallest float that is not below `t`.
fn round_up(t: f64) -> f32 {
    let x = t as f32;
    if f64::from(x) < t { x.next_up() } else { x }
}

/// What a unit of mass in a bin is worth: 1 is a token at the highest edge.
fn weight(edge: f32, top: f32) -> f64 {
    (f64::from(edge) - f64::from(top)).exp() * MassHistogram::ONE_UNIT
}

impl Selector {
    /// Which tokens the filters keep; at least one.
    pub fn select(&mut self, filters: &Filters, seen: &Seen<'_>) -> Selection {
        self.load(seen.mass);
        let mut end = if seen.floor == f32::NEG_INFINITY { End::At(seen.list.len()) } else { End::All };
        for (i, &filter) in filters.steps().iter().enumerate() {
            let last = i + 1 == filters.steps().len();
            end = match self.step(filter, seen, end, last) {
                Ok(end) => end,
                Err(selection) => return selection,
            };
        }
        match end {
            End::At(end) => Selection::Listed(self.from..end),
            _ => {
                let first = if self.from == 0 { Band::ALL.first } else { seen.list[self.from].place() };
                let last = match end {
                    End::Above(logit) => Place { logit, token: u32::MAX },
                    _ => Band::ALL.last,
                };
                Selection::Band(Band { first, last })
            }
        }
    }

    /// The winner of a draw among the kept tokens, from the frontier of the row; `Err` with the floor of the list that
    /// will tell. `selection` is the last answer of [`Selector::select`] for the same row.
    ///
    /// # Errors
    /// The smallest logit that a list must hold.
    pub fn winner(&self, selection: &Selection, seen: &Seen<'_>, frontier: &Frontier) -> Result<Candidate, f32> {
        match selection {
            Selection::Listed(kept) if kept.start == 0 => Ok(frontier.winner_from(seen.list[kept.end - 1].place())),
            Selection::Band(band) if self.from == 0 => Ok(frontier.winner_from(band.last)),
            Selection::Listed(kept) => Err(seen.list[kept.end - 1].logit),
            Selection::Band(band) => Err(band.last.logit),
            Selection::Unlisted { floor } => Err(*floor),
            Selection::Prefix if self.from > 0 => Err(self.floor_of(self.limits.1)),
            Selection::Prefix => {
                for point in frontier.iter() {
                    match self.prefix_keeps(seen, point.place()) {
                        Some(true) => return Ok(*point),
                        Some(false) => {}
                        None => return Err(edge_of(point.logit)),
                    }
                }
                Err(f32::NEG_INFINITY)
            }
        }
    }

    /// The floor of a list that holds all that the filters keep.
    pub fn floor(&self, selection: &Selection, seen: &Seen<'_>) -> f32 {
        match selection {
            Selection::Listed(kept) => seen.list[kept.end - 1].logit,
            Selection::Band(band) if band.last == Band::ALL.last => f32::NEG_INFINITY,
            Selection::Band(band) => band.last.logit,
            Selection::Prefix => self.floor_of(self.limits.1).max(self.prefix_floor),
            Selection::Unlisted { floor } => *floor,
        }
    }

    fn load(&mut self, mass: &MassHistogram) {
        self.cells.clear();
        self.from = 0;
        let mut top = None;
        for (edge, mass) in mass.cells() {
            let top = *top.get_or_insert(edge);
            let weight = weight(edge, top);
            self.cells.push(Cell { edge, weight, mass });
        }
        self.top = top.unwrap_or(f32::NEG_INFINITY);
    }

    /// One filter; `Err` is an answer that ends the walk.
    fn step(&mut self, filter: Filter, seen: &Seen<'_>, end: End, last: bool) -> Result<End, Selection> {
        let until = if let End::At(end) = end { end } else { seen.list.len() };
        let first = f64::from(seen.list[self.from].logit);
        match filter {
            Filter::TopK(k) => match (self.from + k as usize, end) {
                (at, _) if at <= until => Ok(End::At(at)),
                (_, End::At(_)) => Ok(end),
                (_, End::Above(t)) => Err(Selection::Unlisted { floor: t.max(self.floor_of_count(k)) }),
                (_, End::All) => Err(Selection::Unlisted { floor: self.floor_of_count(k) }),
            },
            Filter::MinP(p) => self.above(round_up(first + f64::from(p).ln()), seen, end),
            Filter::TopNSigma(n) => self.above(round_up(first - f64::from(n) * seen.moments.deviation()), seen, end),
            Filter::Epsilon(epsilon) => {
                let (low, high) = self.threshold(epsilon, seen, end);
                let (a, b) = (self.above(low, seen, end)?, self.above(high, seen, end)?);
                if a == b { Ok(a) } else { Err(Selection::Unlisted { floor: low }) }
            }
            Filter::Xtc(p) => {
                let (low, high) = self.threshold(p, seen, end);
                let (a, b) = (self.above(low, seen, end)?, self.above(high, seen, end)?);
                match (a, b) {
                    (End::At(a), End::At(b)) if a == b => {
                        self.drop_first(seen, a - 1 - self.from);
                        Ok(end)
                    }
                    _ => Err(Selection::Unlisted { floor: low }),
                }
            }
            Filter::TopP(p) => {
                let (low, high) = self.total(seen, end);
                let limits = (f64::from(p) * low, f64::from(p) * high);
                match (self.reach(seen, until, limits.0), self.reach(seen, until, limits.1), end) {
                    (Some(a), Some(b), _) if a == b => Ok(End::At(a)),
                    (_, _, End::At(_)) => Ok(end),
                    (None, None, _) if last => {
                        self.limits = limits;
                        self.prefix_floor = if let End::Above(t) = end { t } else { f32::NEG_INFINITY };
                        Err(Selection::Prefix)
                    }
                    (_, _, End::Above(t)) => Err(Selection::Unlisted { floor: t }),
                    (_, _, End::All) => Err(Selection::Unlisted { floor: self.floor_of(limits.1) }),
                }
            }
            Filter::TypicalP(p) => match end {
                End::At(end) => {
                    let kept = typical(&seen.list[self.from..end], f64::from(p));
                    let end = self.from + kept.end;
                    self.drop_first(seen, kept.start);
                    Ok(End::At(end))
                }
                End::Above(floor) => Err(Selection::Unlisted { floor }),
                End::All => Err(NEVER),
            },
        }
    }

    /// Keeps logits of at least `t`, and one token always.
    fn above(&self, t: f32, seen: &Seen<'_>, end: End) -> Result<End, Selection> {
        let at = seen.list.partition_point(|c| c.logit >= t).max(self.from + 1);
        Ok(match end {
            End::At(end) => End::At(end.min(at)),
            _ if at < seen.list.len() || t >= seen.floor => End::At(at),
            End::Above(s) => End::Above(s.max(t)),
            End::All => End::Above(t),
        })
    }

    /// The logits between which a probability of `p` among the kept tokens lies.
    fn threshold(&self, p: f32, seen: &Seen<'_>, end: End) -> (f32, f32) {
        let (low, high) = self.total(seen, end);
        let logit = |mass: f64| round_up(f64::from(self.top) + mass.ln() + f64::from(p).ln());
        (logit(low), logit(high))
    }

    /// Drops the first `n` of the kept tokens.
    fn drop_first(&mut self, seen: &Seen<'_>, n: usize) {
        for c in &seen.list[self.from..self.from + n] {
            let (edge, mass) = self.mass_of(c.logit);
            if let Some(cell) = self.cells.iter_mut().find(|cell| cell.edge == edge) {
                cell.mass -= mass;
            }
        }
        self.from += n;
    }

    /// The bin of a logit and its mass there; 0 below the histogram's window.
    fn mass_of(&self, logit: f32) -> (f32, u64) {
        let (edge, mass) = MassHistogram::mass_of(logit);
        (edge, if MassHistogram::in_window(self.top, edge) { mass } else { 0 })
    }

    /// The mass of the kept tokens relative to the highest edge: not below the first, not above the second.
    fn total(&self, seen: &Seen<'_>, end: End) -> (f64, f64) {
        let whole = |cells: &[Cell]| cells.iter().fold(0.0, |sum, c| sum + c.weight * c.mass as f64);
        match end {
            End::At(end) => {
                let sum = self.sum(&seen.list[self.from..end]);
                (sum, sum)
            }
            End::All => (whole(&self.cells), whole(&self.cells)),
            End::Above(t) => {
                let edge = edge_of(t);
                let cells = &self.cells[..self.cells.partition_point(|c| c.edge > edge)];
                let listed = seen.list[self.from..].iter().filter(|c| edge_of(c.logit) == edge);
                let listed = listed.map(|c| self.mass_of(c.logit).1).sum::<u64>() as f64;
                let partial = self.cells.get(cells.len()).filter(|c| c.edge == edge);
                let (weight, full) = partial.map_or((0.0, 0.0), |c| (c.weight, c.mass as f64));
                (whole(cells) + weight * listed, whole(cells) + weight * full)
            }
        }
    }

    /// The mass of listed tokens, in the order in which the histogram sums.
    fn sum(&self, listed: &[Candidate]) -> f64 {
        let mut sum = 0.0;
        self.run(listed, |_, mass| {
            sum = mass;
            false
        });
        sum
    }

    /// Calls `visit` with each token's number and the mass of the tokens through it, until it says true.
    fn run(&self, listed: &[Candidate], mut visit: impl FnMut(usize, f64) -> bool) {
        let (mut done, mut at, mut factor, mut mass) = (0.0, f32::INFINITY, 0.0, 0u64);
        for (i, c) in listed.iter().enumerate() {
            let (edge, own) = self.mass_of(c.logit);
            if edge != at {
                done += factor * mass as f64;
                (at, factor, mass) = (edge, weight(edge, self.top), 0);
            }
            mass += own;
            if visit(i, done + factor * mass as f64) {
                return;
            }
        }
    }

    /// The end of the shortest run of listed tokens, up to `until`, whose mass reaches `limit`.
    fn reach(&self, seen: &Seen<'_>, until: usize, limit: f64) -> Option<usize> {
        let mut end = None;
        self.run(&seen.list[self.from..until], |i, mass| {
            end = (mass >= limit).then_some(self.from + i + 1);
            end.is_some()
        });
        end
    }

    /// The edge of the bin in which the mass from the top reaches `limit`.
    fn floor_of(&self, limit: f64) -> f32 {
        let mut sum = 0.0;
        let reached = self.cells.iter().find(|c| {
            sum += c.weight * c.mass as f64;
            sum >= limit
        });
        reached.map_or(f32::NEG_INFINITY, |c| c.edge)
    }

    /// The edge of a bin that has `k` more tokens at or above it, as far as the masses tell.
    fn floor_of_count(&self, k: u32) -> f32 {
        let mut count = 0;
        let reached = self.cells.iter().find(|c| {
            count += MassHistogram::least_count(c.mass);
            count >= u64::from(k)
        });
        reached.map_or(f32::NEG_INFINITY, |c| c.edge)
    }

    /// Whether the prefix holds a token, as far as the masses tell: it does when the mass before it is below the limit.
    fn prefix_keeps(&self, seen: &Seen<'_>, place: Place) -> Option<bool> {
        if seen.list.last().is_some_and(|last| place.reaches(&last.place())) {
            return Some(true);
        }
        let (edge, own) = self.mass_of(place.logit);
        let cells = self.cells.partition_point(|c| c.edge > edge);
        let sum = self.cells[..cells].iter().fold(0.0, |sum, c| sum + c.weight * c.mass as f64);
        let cell = self.cells.get(cells).filter(|c| c.edge == edge);
        let (weight, full) = cell.map_or((0.0, own), |c| (c.weight, c.mass));
        let listed = seen.list.iter().filter(|c| edge_of(c.logit) == edge).map(|c| self.mass_of(c.logit).1);
        if place.logit < self.prefix_floor || sum + weight * listed.sum::<u64>() as f64 >= self.limits.1 {
            Some(false)
        } else if sum + weight * ((full - own) as f64) < self.limits.0 {
            Some(true)
        } else {
            None
        }
    }
}

/// The tokens whose surprisal is nearest to the entropy, until their probability reaches `p`: from the token at the
/// entropy outwards, the nearer side first.
fn typical(listed: &[Candidate], p: f64) -> Range<usize> {
    let max = f64::from(listed[0].logit);
    let sum: f64 = listed.iter().map(|c| (f64::from(c.logit) - max).exp()).sum();
    let log_z = max + sum.ln();
    let surprisal = |i: usize| log_z - f64::from(listed[i].logit);
    let entropy: f64 = (0..listed.len()).map(|i| surprisal(i) * (-surprisal(i)).exp()).sum();
    let split = listed.partition_point(|c| log_z - f64::from(c.logit) < entropy);
    let (mut kept, mut mass) = (split..split, 0.0);
    while mass < p && kept.len() < listed.len() {
        let up = (kept.start > 0).then(|| entropy - surprisal(kept.start - 1));
        let down = (kept.end < listed.len()).then(|| surprisal(kept.end) - entropy);
        let i = match (up, down) {
            (Some(up), down) if down.is_none_or(|down| up <= down) => {
                kept.start -= 1;
                kept.start
            }
            _ => {
                kept.end += 1;
                kept.end - 1
            }
        };
        mass += (-surprisal(i)).exp();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::{Domain, Noise};
    use crate::reference;
    use crate::winner::Winner;
    use proptest::prelude::*;

    /// A row in the order of falling logits, with scores, and its summaries.
    struct Row {
        sorted: Vec<Candidate>,
        mass: MassHistogram,
        moments: Moments,
        frontier: Frontier,
    }

    impl Row {
        fn new(logits: &[f32], seed: u64) -> Row {
            let noise = Noise::new(seed, 1).unwrap();
            let mut sorted: Vec<Candidate> = (0..)
                .zip(logits)
                .map(|(token, &logit)| Candidate {
                    winner: Winner::new(logit + noise.gumbel(Domain::Token, 0, token), token),
                    logit,
                })
                .collect();
            let (mut mass, mut moments, mut frontier) = <(MassHistogram, Moments, Frontier)>::default();
            for c in &sorted {
                mass.push(c.logit);
                moments.push(c.logit);
                frontier.push(*c);
            }
            sorted.sort_by(|a, b| {
                if a.place().reaches(&b.place()) { core::cmp::Ordering::Less } else { core::cmp::Ordering::Greater }
            });
            Row { sorted, mass, moments, frontier }
        }

        /// What a second pass lists.
        fn list(&self, floor: f32) -> Seen<'_> {
            let n = self.sorted.partition_point(|c| c.logit >= floor).max(1);
            let floor = if n == self.sorted.len() { f32::NEG_INFINITY } else { floor };
            Seen { list: &self.sorted[..n], floor, mass: &self.mass, moments: &self.moments }
        }
    }

    fn logits() -> impl Strategy<Value = Vec<f32>> {
        prop_oneof![
            prop::collection::vec(-6f32..6.0, 1..200),
            prop::collection::vec((-8i8..9).prop_map(f32::from), 1..200),
            prop::collection::vec((-80i8..9).prop_map(|l| f32::from(l) / 4.0), 1..300),
            prop::collection::vec(prop_oneof![9 => -1f32..1.0, 1 => 8f32..12.0], 1..300),
            prop::collection::vec(-100f32..100.0, 1..60),
        ]
    }

    fn filter() -> impl Strategy<Value = Filter> {
        let share = || prop_oneof![0.01f32..1.0, Just(0.5f32), Just(0.25f32), 0.9f32..1.0];
        prop_oneof![
            prop_oneof![1u32..30, 1u32..300].prop_map(Filter::TopK),
            share().prop_map(Filter::TopP),
            prop_oneof![share(), 1e-4f32..0.1].prop_map(Filter::MinP),
            (0.1f32..4.0).prop_map(Filter::TopNSigma),
            (1e-4f32..0.2).prop_map(Filter::Epsilon),
            share().prop_map(Filter::TypicalP),
            (0.01f32..0.6).prop_map(Filter::Xtc),
        ]
    }

    fn filters() -> impl Strategy<Value = Vec<Filter>> {
        prop::collection::vec(filter(), 1..5)
    }

    fn of(steps: &[Filter]) -> Filters {
        let mut filters = Filters::new(1.0);
        steps.iter().for_each(|&f| filters.push(f));
        filters
    }

    /// The filters with their values moved by a little, to see whether a boundary is near.
    fn moved(steps: &[Filter], by: f32) -> Filters {
        of(&steps
            .iter()
            .map(|f| match *f {
                Filter::TopK(k) => Filter::TopK(k),
                Filter::TopP(p) => Filter::TopP(p * by),
                Filter::MinP(p) => Filter::MinP(p * by),
                Filter::TopNSigma(n) => Filter::TopNSigma(n * (1.0 + (by - 1.0) * 1e3)),
                Filter::Epsilon(p) => Filter::Epsilon(p * by),
                Filter::TypicalP(p) => Filter::TypicalP(p * by),
                Filter::Xtc(p) => Filter::Xtc(p * by),
            })
            .collect::<Vec<_>>())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn a_short_list_gives_what_the_whole_row_gives(
            logits in logits(), steps in filters(), seed: u64, limit in 1usize..80,
        ) {
            let (row, filters) = (Row::new(&logits, seed), of(&steps));
            let mut selector = Selector::default();
            let whole = selector.select(&filters, &row.list(f32::NEG_INFINITY));
            let Selection::Listed(kept) = whole.clone() else { panic!("{whole:?}") };
            prop_assert!(!kept.is_empty() && kept.end <= row.sorted.len());
            let want = row.sorted[kept.clone()].iter().fold(Candidate::NONE, |w, c| w.merge(*c));

            let few = &row.sorted[..limit.min(row.sorted.len())];
            let seen = Seen::first(few, limit, &row.mass, &row.moments);
            let first = selector.select(&filters, &seen);
            if let Selection::Listed(listed) = &first {
                prop_assert_eq!(listed, &kept);
            }
            if let Selection::Band(band) = &first {
                let inside: Vec<_> = (0..row.sorted.len()).filter(|&i| band.contains(row.sorted[i].place())).collect();
                prop_assert_eq!(inside, kept.clone().collect::<Vec<_>>());
            }
            match selector.winner(&first, &seen, &row.frontier) {
                Ok(winner) => prop_assert_eq!(winner, want),
                Err(floor) => prop_assert!(floor < f32::INFINITY),
            }
            // Longer lists tell, the whole row at the latest.
            let (mut selection, mut seen) = (first, seen);
            for pass in 0..3 {
                if !matches!(selection, Selection::Listed(_)) {
                    let floor = if pass < 2 { selector.floor(&selection, &seen) } else { f32::NEG_INFINITY };
                    seen = row.list(floor);
                    selection = selector.select(&filters, &seen);
                }
            }
            prop_assert_eq!(selection, Selection::Listed(kept));
        }

        #[test]
        fn the_set_is_the_references(logits in logits(), steps in filters()) {
            let row = Row::new(&logits, 1);
            // Where logits are equal, a rounding decides on which side of the entropy they lie.
            let ties = row.sorted.windows(2).any(|w| w[0].logit == w[1].logit);
            prop_assume!(!ties || !steps.iter().any(|f| matches!(f, Filter::TypicalP(_))));
            let got = Selector::default().select(&of(&steps), &row.list(f32::NEG_INFINITY));
            let near = [1.0 - 1e-6, 1.0, 1.0 + 1e-6].map(|by| reference::kept(&moved(&steps, by), &row.sorted));
            // A boundary that a millionth moves is not tested here.
            if near.iter().all(|kept| *kept == near[0]) {
                prop_assert_eq!(got, Selection::Listed(near[0].clone()));
            }
        }
    }

    #[test]
    fn boundaries_are_included() {
        // Four equal tokens of probability 1/4: a mass of exactly p is reached by the second.
        let row = Row::new(&[1.0; 4], 1);
        let kept = |f| Selector::default().select(&of(&[f]), &row.list(f32::NEG_INFINITY));
        assert_eq!(kept(Filter::TopP(0.5)), Selection::Listed(0..2));
        assert_eq!(kept(Filter::TopP(0.5f32.next_up())), Selection::Listed(0..3));
        assert_eq!(kept(Filter::TopK(3)), Selection::Listed(0..3));
        assert_eq!(kept(Filter::MinP(1.0)), Selection::Listed(0..4));
        assert_eq!(kept(Filter::Epsilon(0.9)), Selection::Listed(0..1));
        assert_eq!(kept(Filter::Xtc(0.2)), Selection::Listed(3..4));
        assert_eq!(kept(Filter::Xtc(0.26)), Selection::Listed(0..4));
    }
}
