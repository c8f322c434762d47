//! Compares the bins with plain sums of integers.

use super::*;
use proptest::prelude::*;

fn histogram(logits: &[f32]) -> MassHistogram {
    let mut h = MassHistogram::default();
    h.extend_from_slice(logits);
    h
}

fn logits() -> impl Strategy<Value = Vec<f32>> {
    let one = prop_oneof![
        8 => -90f32..90.0,
        2 => -1e4f32..1e4,
        1 => -1e38f32..1e38,
        1 => Just(f32::NEG_INFINITY),
        1 => Just(0.0f32),
        1 => Just(-0.0f32),
        2 => 2_097_100f32..2_097_200.0,
        1 => 16_777_150f32..16_777_300.0,
    ];
    prop::collection::vec(one, 0..60)
}

proptest! {
    #[test]
    fn the_order_does_not_matter(mut l in logits(), split in 0usize..60, rotate in 0usize..60) {
        let whole = histogram(&l);
        let (a, b) = l.split_at(split.min(l.len()));
        let (mut ab, mut ba) = (histogram(a), histogram(b));
        ab.merge(&histogram(b));
        ba.merge(&histogram(a));
        prop_assert_eq!(&ab, &whole);
        prop_assert_eq!(&ba, &whole);
        if !l.is_empty() {
            let n = rotate % l.len();
            l.rotate_left(n);
        }
        prop_assert_eq!(&histogram(&l), &whole);
    }

    #[test]
    fn bins_below_an_edge_that_are_empty_need_not_be_touched(l in logits(), others in logits(), at in -90f32..90.0) {
        let edge = edge_of(at);
        let above: Vec<f32> = l.into_iter().filter(|&l| edge_of(l) >= edge).collect();
        let (mut high, mut merged, mut want) = (histogram(&above), histogram(&others), histogram(&others));
        merged.merge_from(&high, edge);
        want.merge(&high);
        prop_assert_eq!(merged, want);
        high.clear_from(edge);
        prop_assert_eq!(high, MassHistogram::default());
    }

    #[test]
    fn bins_below_an_edge_are_taken_out_with_their_mass(
        l in prop::collection::vec(prop_oneof![60 => -40f32..40.0, 1 => -3e5f32..3e5], 1..60), at in -50f32..50.0,
    ) {
        let edge = edge_of(at);
        let lowest = edge_of(l.iter().copied().fold(f32::INFINITY, f32::min));
        let mut rest = histogram(&l);
        let below: f64 = rest.bins().filter(|(at, _)| *at < f64::from(edge)).map(|(at, m)| m * (at - f64::from(edge)).exp()).sum();
        let mut want: Vec<_> = rest.bins().collect();
        want.retain(|(at, _)| *at >= f64::from(edge));
        let taken = rest.drain_below(edge, lowest);
        prop_assert!((taken - below).abs() <= 1e-12 * below, "{} for {}", taken, below);
        prop_assert_eq!(rest.bins().collect::<Vec<_>>(), want);
    }

    #[test]
    fn a_slice_adds_what_its_logits_add(l in prop::collection::vec(prop_oneof![
        60 => -90f32..90.0, 20 => (-700i32..700).prop_map(|i| i as f32 / 8.0), 1 => -300_000f32..300_000.0,
        1 => Just(f32::NEG_INFINITY),
    ], 0..400), whole in prop::collection::vec(-20f32..20.0, 64..300)) {
        for l in [l, whole] {
            let mut one_by_one = MassHistogram::default();
            l.iter().for_each(|&l| one_by_one.push(l));
            prop_assert_eq!(&histogram(&l), &one_by_one);
        }
    }

    #[test]
    fn entries_add_what_their_logits_add(rows in prop::collection::vec(prop::collection::vec(prop_oneof![
        60 => -90f32..90.0, 10 => -300_000f32..300_000.0, 20 => (-700i32..700).prop_map(|i| i as f32 / 8.0),
        1 => Just(f32::NEG_INFINITY),
    ], 1..20), 1..20)) {
        let (mut by_entries, mut one_by_one) = (MassHistogram::default(), MassHistogram::default());
        for row in rows {
            row.iter().for_each(|&logit| one_by_one.push(logit));
            match by_entries.make_room(row.iter().copied().fold(f32::NEG_INFINITY, f32::max)) {
                Some(floor) => {
                    let entry = |&l: &f32| if l >= floor { MassHistogram::entry_of(l) } else { 0 };
                    by_entries.add_entries(&row.iter().map(entry).collect::<Vec<_>>());
                }
                None => row.iter().for_each(|&logit| by_entries.push(logit)),
            }
            prop_assert_eq!(&by_entries, &one_by_one);
        }
    }

    #[test]
    fn a_run_adds_the_masses_of_its_histogram(
        sets in prop::collection::vec((prop::collection::vec(-30f32..30.0, 0..60), prop_oneof![
            6 => Just(0.0f32), 2 => -80f32..80.0, 1 => Just(262_140.0f32), 1 => Just(-3e6f32), 1 => Just(1e9f32),
        ]), 1..5),
    ) {
        let (mut by_runs, mut merged) = (MassHistogram::default(), MassHistogram::default());
        for (logits, shift) in sets {
            let h = histogram(&logits.iter().map(|l| l + shift).collect::<Vec<_>>());
            let (top, runs) = h.run();
            let run: Vec<[u8; 8]> = runs.concat().into_iter().map(u64::to_le_bytes).collect();
            prop_assert!(run.first().is_none_or(|first| *first != [0; 8]));
            prop_assert!(by_runs.add_run(top, &run));
            merged.merge(&h);
            prop_assert_eq!(&by_runs, &merged);
        }
    }

    #[test]
    fn log_z_is_accurate(l in prop::collection::vec(-60f32..60.0, 1..60)) {
        let exact: f64 = l.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        let log_z = histogram(&l).log_z();
        prop_assert!((log_z - exact).abs() < 1e-8 + 1e-15 * exact.abs(), "{} against {}", log_z, exact);
    }

    #[test]
    fn words_carry_the_histogram(l in prop::collection::vec(-1e4f32..1e4, 0..60)) {
        let h = histogram(&l);
        let mut words = Vec::new();
        h.to_words(&mut words);
        prop_assert_eq!(words.len(), MassHistogram::WORDS);
        prop_assert_eq!(MassHistogram::from_words(&words), Some(h.clone()));
        let mut other = histogram(&[3.0, 500.0]);
        prop_assert!(other.assign_words(&words));
        prop_assert_eq!(other, h);
    }
}

#[test]
fn the_highest_bins_hold_the_mass_near_the_top() {
    assert_eq!(histogram(&[]).highest(9), [&[] as &[u64]; 2]);
    for top in [0.0f32, 1.0, 17.0, -3.0, 63.9, -1e4] {
        let h = histogram(&[top, top - 1.0, top - 2.0, top - 40.0]);
        for (count, held) in [(1, 1), (17, 3), (100, 3), (512, 4), (600, 4)] {
            let runs = h.highest(count);
            assert_eq!(runs[0].len() + runs[1].len(), count.min(512), "{top} {count}");
            assert_eq!(runs.iter().flat_map(|run| *run).filter(|&&mass| mass > 0).count(), held, "{top} {count}");
        }
    }
}

#[test]
fn words_that_no_histogram_has_are_refused() {
    let mut words = Vec::new();
    histogram(&[1.0]).to_words(&mut words);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.01, 2.0, 1e30] {
        words[0] = u64::from(bad.to_bits());
        assert_eq!(MassHistogram::from_words(&words), None, "{bad}");
        let mut emptied = histogram(&[5.0]);
        assert!(!emptied.assign_words(&words) && emptied == MassHistogram::default(), "{bad}");
    }
    assert_eq!(MassHistogram::from_words(&words[1..]), None);
}

#[test]
fn runs_that_no_histogram_has_are_refused() {
    let mut h = histogram(&[5.0]);
    let (one, none) = (1u64.to_le_bytes(), 0u64.to_le_bytes());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.01] {
        assert!(!h.add_run(bad, &[one]), "{bad}");
    }
    assert!(!h.add_run(1.0, &[one, none]) && !h.add_run(1.0, &[]) && !h.add_run(1.0, &[one; 513]));
    assert_eq!(h, histogram(&[5.0]));
    assert!(h.add_run(f32::NEG_INFINITY, &[]) && h.add_run(1.0, &[one; 512]));
}

#[test]
fn masses_rise_with_the_logits_from_bin_to_bin_too() {
    let weighed = |logit: f32| {
        let (edge, mass) = MassHistogram::mass_of(logit);
        weight_of(edge, 64.0) * mass as f64
    };
    for eighths in -512..512 {
        let edge = eighths as f32 / 8.0;
        let mut logits: Vec<f32> =
            (0..24).flat_map(|n| [-1.0, 1.0].map(|sign| edge + sign * 2f32.powi(-n - 4))).collect();
        logits.extend([edge.next_down(), edge, edge.next_up()]);
        logits.sort_by(f32::total_cmp);
        let masses: Vec<f64> = logits.iter().copied().map(weighed).collect();
        assert!(masses.is_sorted(), "{edge}: {masses:?}");
    }
}

#[test]
fn one_token_has_its_own_logit_as_log_mass() {
    for l in [0.0, -3.3, 700.0, -1e4, 1e9, -1e30, f32::MAX, f32::MIN] {
        let log_z = histogram(&[l]).log_z();
        assert!((log_z - f64::from(l)).abs() <= 1e-8 + 1e-7 * f64::from(l).abs(), "{l}: {log_z}");
    }
    assert_eq!(histogram(&[]).log_z(), f64::NEG_INFINITY);
}
