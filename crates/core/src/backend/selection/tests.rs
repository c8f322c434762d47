//! Compares the selections from short lists with those from whole rows, and both with the reference.

use super::*;
use crate::noise::{Domain, Noise};
use crate::params::filters::{Filter, Filters};
use crate::reference;
use crate::summary::frontier::Frontier;
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::moments::Moments;
use crate::summary::winner::Candidate;
use crate::summary::winner::Winner;
use proptest::prelude::*;

/// A row in the order of descending logits, with scores, and its summaries.
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
            if a.logit_rank().is_at_or_before(&b.logit_rank()) {
                core::cmp::Ordering::Less
            } else {
                core::cmp::Ordering::Greater
            }
        });
        Row { sorted, mass, moments, frontier }
    }

    /// The list of a second pass.
    fn list(&self, floor: f32) -> RowView<'_> {
        let n = self.sorted.partition_point(|c| c.logit >= floor).max(1);
        let floor = if n == self.sorted.len() { f32::NEG_INFINITY } else { floor };
        RowView { list: &self.sorted[..n], floor, mass: &self.mass, tail: TailMass::default(), moments: &self.moments }
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
    let mut all = [None; Filters::MAX];
    all.iter_mut().zip(steps).for_each(|(slot, &step)| *slot = Some(step));
    Filters::new(all, 1.0)
}

/// The masses of a pass that skips the tokens below [`Filters::drop_threshold`].
fn cut(logits: &[f32], filters: &Filters, tile: usize) -> MassHistogram {
    let (mut mass, mut largest) = (MassHistogram::default(), f32::NEG_INFINITY);
    for tile in logits.chunks(tile) {
        largest = tile.iter().copied().fold(largest, f32::max);
        let floor = MassHistogram::edge(filters.drop_threshold(largest));
        tile.iter().filter(|&&logit| logit >= floor).for_each(|&logit| mass.push(logit));
    }
    mass
}

/// The filters with slightly changed values, to detect a near boundary.
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
        let view = RowView::first(few, limit, &row.mass, &row.moments);
        let first = selector.select(&filters, &view);
        if let Selection::Listed(listed) = &first {
            prop_assert_eq!(listed, &kept);
        }
        if let Selection::RankRange(band) = &first {
            let inside: Vec<_> = (0..row.sorted.len()).filter(|&i| band.contains(row.sorted[i].logit_rank())).collect();
            prop_assert_eq!(inside, kept.clone().collect::<Vec<_>>());
        }
        match selector.winner(&first, &view, &row.frontier) {
            Ok(winner) => prop_assert_eq!(winner, want),
            Err(floor) => prop_assert!(floor < f32::INFINITY),
        }
        // The mass before the points in doubt decides, also as a sum of two parts.
        let mut doubts = Vec::new();
        selector.doubts(&first, &view, &row.frontier, &mut doubts);
        if !doubts.is_empty() {
            prop_assert!(selector.winner(&first, &view, &row.frontier).is_err());
            let (head, tail) = logits.split_at(logits.len() / 2);
            for doubt in &mut doubts {
                let mut other = PrefixMass::new(doubt.rank);
                other.extend_from_slice(head.len() as u32, tail);
                doubt.extend_from_slice(0, head);
                doubt.merge(&other);
            }
            prop_assert_eq!(selector.winner_knowing(&first, &view, &row.frontier, &doubts), Ok(want));
        }
        if !steps.iter().any(|f| matches!(f, Filter::Xtc(_) | Filter::TypicalP(_))) {
            let floor = selector.floor(&first, &view);
            prop_assert!(selector.max_count(floor) >= row.sorted.partition_point(|c| c.logit >= floor) as u64);
        }
        // The selector ignores masses if the filters do not need them.
        if !filters.need_mass_beyond(few.len()) {
            let unweighed = RowView { mass: &MassHistogram::default(), ..view };
            prop_assert_eq!(&selector.select(&filters, &unweighed), &first);
        }
        // Longer lists decide, at the latest the list of the whole row.
        let (mut selection, mut view) = (first, view);
        for pass in 0..3 {
            if !matches!(selection, Selection::Listed(_)) {
                let floor = if pass < 2 { selector.floor(&selection, &view) } else { f32::NEG_INFINITY };
                view = row.list(floor);
                selection = selector.select(&filters, &view);
            }
        }
        prop_assert_eq!(selection, Selection::Listed(kept));
    }

    #[test]
    fn masses_above_the_min_p_cutoff_give_the_same_decisions(
        mut logits in prop::collection::vec((-16i8..1, 0u8..8), 2..120), rising: bool, tile in 1usize..9,
        p in 0.2f32..0.9, q in 0.2f32..1.0, seed: u64, limit in 1usize..8,
    ) {
        // Bins of several tokens each; some come before the largest logit.
        if rising {
            logits.sort_unstable();
        }
        let logits: Vec<_> = logits.iter().map(|&(bin, part)| f32::from(bin) / 8.0 + f32::from(part) / 64.0).collect();
        let (row, filters) = (Row::new(&logits, seed), of(&[Filter::MinP(p), Filter::TopP(q)]));
        let less = cut(&logits, &filters, tile);
        let few = &row.sorted[..limit.min(row.sorted.len())];
        let answer = |mass| {
            let (mut selector, mut doubts) = (Selector::default(), Vec::new());
            let view = RowView::first(few, limit, mass, &row.moments);
            let selection = selector.select(&filters, &view);
            selector.doubts(&selection, &view, &row.frontier, &mut doubts);
            doubts.iter_mut().for_each(|doubt| doubt.extend_from_slice(0, &logits));
            let first = selector.winner(&selection, &view, &row.frontier);
            let winner = selector.winner_knowing(&selection, &view, &row.frontier, &doubts);
            let floor = selector.floor(&selection, &view);
            (selection, first, winner, doubts, floor, selector.max_count(floor))
        };
        prop_assert_eq!(answer(&less), answer(&row.mass));
    }

    #[test]
    fn masses_without_bins_below_a_floor_decide_alike_or_take_a_pass(
        logits in logits(), p in prop_oneof![0.01f32..1.0, Just(0.5f32)], seed: u64, limit in 1usize..80,
        floors in prop::array::uniform2((-10f32..14.0, 0usize..100)), errors in prop::array::uniform2(-1f64..1.0),
    ) {
        let (row, filters) = (Row::new(&logits, seed), of(&[Filter::TopP(p)]));
        // Two workers, each with a floor after some of its tokens.
        let (mut mass, mut below) = <(MassHistogram, TailMass)>::default();
        for (half, ((floor, after), error)) in floors.into_iter().zip(errors).enumerate() {
            let (mut own, mut rest) = <(MassHistogram, TailMass)>::default();
            let part: Vec<f32> = logits.iter().copied().skip(half).step_by(2).collect();
            let (first, others) = part.split_at(after.min(part.len()));
            own.extend_from_slice(first);
            rest.raise(floor);
            let floor = rest.floor();
            others.iter().filter(|&&logit| logit >= floor).for_each(|&logit| own.push(logit));
            let lower = others.iter().filter(|&&logit| logit < floor);
            let sum: f64 = lower.map(|&logit| (f64::from(logit) - f64::from(floor)).exp()).sum();
            rest.add(sum * (1.0 + error / 40_000.0));
            mass.merge(&own);
            below.merge(&rest);
        }
        let whole = below.mass(0.0) + mass.log_z().exp();
        prop_assert!((whole.ln() - row.mass.log_z()).abs() < 1.0 / 32_768.0);

        let few = &row.sorted[..limit.min(row.sorted.len())];
        let (mut selector, mut doubts) = (Selector::default(), Vec::new());
        let kept = selector.select(&filters, &row.list(f32::NEG_INFINITY));
        let Selection::Listed(kept) = kept else { panic!("{kept:?}") };
        let want = row.sorted[kept.clone()].iter().fold(Candidate::NONE, |w, c| w.merge(*c));
        // All kept tokens are above a spared floor. A floor is spared if the mass above exceeds the share by a margin.
        let reaching = row.sorted.iter().filter(|c| c.logit >= below.floor()).map(|c| f64::from(c.logit).exp()).sum::<f64>();
        prop_assert!(!below.is_below_prefix(&mass, p) || row.sorted[kept.end - 1].logit >= below.floor());
        prop_assert!(below.is_below_prefix(&mass, p) || reaching < f64::from(p) * whole * 1.001);
        let view = RowView { tail: below, ..RowView::first(few, limit, &mass, &row.moments) };
        let selection = selector.select(&filters, &view);
        if let Selection::Listed(listed) = &selection {
            prop_assert_eq!(listed, &kept);
        }
        if let Ok(winner) = selector.winner(&selection, &view, &row.frontier) {
            prop_assert_eq!(winner, want);
            return Ok(());
        }
        // A further pass puts the masses below the floor into bins.
        selector.doubts(&selection, &view, &row.frontier, &mut doubts);
        doubts.iter_mut().for_each(|doubt| doubt.extend_from_slice(0, &logits));
        let mut mass = mass.clone();
        mass.clear_below(below.floor());
        mass.extend_below(&logits, below.floor());
        prop_assert_eq!(&mass, &row.mass);
        let view = RowView { mass: &mass, tail: TailMass::default(), ..view };
        let selection = selector.select(&filters, &view);
        prop_assert!(!doubts.is_empty());
        prop_assert_eq!(selector.winner_knowing(&selection, &view, &row.frontier, &doubts), Ok(want));
    }

    #[test]
    fn an_estimated_floor_leaves_at_most_its_share_below(
        bulk in prop::collection::vec(-8f32..8.0, 64..400), peak in -8f32..20.0, share in 0.01f64..0.3, times in 1u64..40,
    ) {
        let mut view = MassHistogram::default();
        view.extend_from_slice(&bulk);
        let mut below = TailMass::default();
        let tokens = bulk.len() as u64;
        let largest = bulk.iter().copied().fold(peak, f32::max);
        if let Some(floor) = below.estimate_floor(&view, tokens, tokens * times, largest, share) {
            let times = times as f64;
            let weight = |logit: &f32| f64::from(*logit).exp();
            let under: f64 = bulk.iter().filter(|&&logit| logit < floor).map(weight).sum();
            let whole: f64 = f64::from(largest).exp().max(bulk.iter().map(weight).sum()) + bulk.iter().map(weight).sum::<f64>() * times;
            prop_assert!(under * times <= share * whole * 1.001);
            below.raise(floor);
            prop_assert_eq!(below.floor(), floor);
            // A second estimate is higher or `None`.
            prop_assert!(below.estimate_floor(&view, tokens, tokens, largest, share).is_none_or(|higher| higher > floor));
        }
    }

    #[test]
    fn the_set_is_the_references(logits in logits(), steps in filters()) {
        let row = Row::new(&logits, 1);
        // For equal logits, a rounding decides their side of the entropy.
        let ties = row.sorted.windows(2).any(|w| w[0].logit == w[1].logit);
        prop_assume!(!ties || !steps.iter().any(|f| matches!(f, Filter::TypicalP(_))));
        let got = Selector::default().select(&of(&steps), &row.list(f32::NEG_INFINITY));
        let near = [1.0 - 1e-6, 1.0, 1.0 + 1e-6].map(|by| reference::kept(&moved(&steps, by), &row.sorted));
        // Skips a boundary that a relative change of 1e-6 moves.
        if near.iter().all(|kept| *kept == near[0]) {
            prop_assert_eq!(got, Selection::Listed(near[0].clone()));
        }
    }
}

#[test]
fn boundaries_are_included() {
    // Four equal tokens of probability 1/4: the second token reaches a mass of exactly p.
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

#[test]
fn a_mass_of_exactly_p_is_reached_among_many_equal_tokens() {
    for n in [128u32, 1000, 30_011, 262_144] {
        for logit in [0.0f32, 1.3, -77.7] {
            let row = Row::new(&vec![logit; n as usize], 3);
            for p in [0.125f32, 0.3, 0.5, 0.75, 0.9, 0.999, 1e-6] {
                let filters = of(&[Filter::TopP(p)]);
                // The product of 24 and 18 bits is exact.
                let want = (f64::from(p) * f64::from(n)).ceil() as usize;
                let mut selector = Selector::default();
                let whole = selector.select(&filters, &row.list(f32::NEG_INFINITY));
                assert_eq!(whole, Selection::Listed(0..want), "{n} tokens of logit {logit}, p {p}");
                // A list of the first 64 tokens, and the masses before the last kept token and before the next token.
                let view = RowView::first(&row.sorted[..64], 64, &row.mass, &row.moments);
                let first = selector.select(&filters, &view);
                if want <= 64 {
                    assert_eq!(first, whole, "{n} tokens, p {p}");
                    continue;
                }
                for (at, kept) in [(want - 1, true), (want, false)] {
                    let Some(&point) = row.sorted.get(at) else { continue };
                    let mut frontier = Frontier::default();
                    frontier.push(point);
                    let mut before = PrefixMass::new(point.logit_rank());
                    before.extend_from_slice(0, &vec![logit; n as usize]);
                    let found = selector.winner_knowing(&first, &view, &frontier, &[before]);
                    assert_eq!(found.is_ok(), kept, "{n} tokens of logit {logit}, p {p}, rank {at}");
                }
            }
        }
    }
}

#[test]
fn a_probability_of_exactly_the_limit_reaches_it_and_one_right_below_does_not() {
    for n in [3u32, 4, 5, 9, 10, 17, 64, 257, 4096] {
        let share = 1.0 / n as f32;
        for logit in [0.0f32, 1.25, -7.3, 0.118_005_75, 1.098_236_1, -1e15, 3e38] {
            let row = Row::new(&vec![logit; n as usize], 3);
            for p in [share.next_down(), share, share.next_up()] {
                let reached = f64::from(p) * f64::from(n) <= 1.0;
                let kept = if reached { 0..n } else { 0..1 };
                let dropped = if reached { n - 1..n } else { 0..n };
                for (filter, want) in [(Filter::Epsilon(p), kept), (Filter::Xtc(p), dropped)] {
                    let (filters, want) = (of(&[filter]), want.start as usize..want.end as usize);
                    assert_eq!(
                        reference::kept(&filters, &row.sorted),
                        want,
                        "{filter:?}, {n} of {logit}, the reference"
                    );
                    let mut selector = Selector::default();
                    let whole = selector.select(&filters, &row.list(f32::NEG_INFINITY));
                    assert_eq!(whole, Selection::Listed(want.clone()), "{filter:?}, {n} of {logit}");
                    // A list of the first two tokens.
                    let first =
                        selector.select(&filters, &RowView::first(&row.sorted[..2], 2, &row.mass, &row.moments));
                    let holds = |band: RankRange| row.sorted.iter().all(|c| band.contains(c.logit_rank()));
                    let agrees = match first {
                        Selection::Listed(listed) => listed == want,
                        Selection::RankRange(band) => want.len() == n as usize && holds(band),
                        _ => matches!(filter, Filter::Xtc(_)),
                    };
                    assert!(agrees, "{filter:?}, {n} of {logit}, from two");
                }
            }
        }
    }
}

#[test]
fn half_of_any_number_of_equal_logits_is_half_of_them() {
    for filter in [Filter::TopP(0.5), Filter::TypicalP(0.5)] {
        let filters = Filters::new([Some(filter), None, None, None, None, None, None], 1.0);
        for n in 1..400 {
            let row = Row::new(&vec![-7.3; n], 1);
            let (want, view) = (0..n.div_ceil(2), row.list(f32::NEG_INFINITY));
            assert_eq!(reference::kept(&filters, &row.sorted), want, "{filter:?}, the reference");
            assert_eq!(Selector::default().select(&filters, &view), Selection::Listed(want), "{filter:?}");
        }
    }
}
