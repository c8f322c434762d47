use super::*;
use crate::params::history::History;
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_list_does_what_its_knobs_say(
        prompt in prop::collection::vec(0u32..16, 0..12), output in prop::collection::vec(0u32..16, 0..12),
        bias in prop::collection::btree_map(0u32..16, -2f32..2.0, 0..8), banned in prop::collection::vec(0u32..16, 0..4),
        stops in prop::collection::vec(0u32..16, 0..3), min_tokens in 0u32..14,
        repetition in prop_oneof![Just(1f32), 0.5f32..2.0], frequency in prop_oneof![Just(0f32), -1f32..1.0],
        presence in prop_oneof![Just(0f32), -1f32..1.0],
    ) {
        let bias: Vec<_> = bias.into_iter().collect();
        let mut history = History::new(&prompt);
        history.extend(output.iter().copied());
        let row = RowParams {
            logit_bias: &bias, banned: &banned, stop_token_ids: &stops, min_tokens, history: Some(&history),
            repetition_penalty: repetition, frequency_penalty: frequency, presence_penalty: presence,
            ..RowParams::default()
        };
        let mut all = Adjustments::default();
        all.collect_within([&row, &RowParams::default(), &row], 5..11);
        let within = [all.row(0).to_vec(), all.row(2).to_vec()];
        prop_assert!(all.row(1).is_empty());
        all.collect([&RowParams::default(), &row, &RowParams::default()]);
        let of_whole: Vec<_> = all.row(1).iter().filter(|a| (5..11).contains(&a.token)).copied().collect();
        prop_assert_eq!(within, [of_whole.clone(), of_whole]);
        prop_assert!(all.row(0).is_empty() && all.row(2).is_empty());
        prop_assert!(all.row(1).windows(2).all(|w| w[0].token < w[1].token));
        for token in 0..16 {
            for logit in [-3.0f32, 0.0, 3.0] {
                let count = output.iter().filter(|&&t| t == token).count() as f32;
                let mut want = logit;
                if banned.contains(&token) || (output.len() < min_tokens as usize && stops.contains(&token)) {
                    want = f32::NEG_INFINITY;
                }
                want += bias.iter().find(|b| b.0 == token).map_or(0.0, |b| b.1);
                if count > 0.0 || prompt.contains(&token) {
                    want = if want > 0.0 { want / repetition } else { want * repetition };
                }
                if count > 0.0 {
                    want -= frequency * count + presence;
                }
                let adjustment = all.row(1).iter().find(|a| a.token == token);
                prop_assert_eq!(adjustment.map_or(logit, |a| a.apply(logit)), want);
            }
        }
    }
}

#[test]
fn long_lists_with_repeats_are_folded_within_their_row() {
    let banned: Vec<u32> = (0..40_000).rev().chain(0..9).collect();
    let stops: Vec<u32> = (0..40_000).rev().step_by(2).collect();
    let row = RowParams { banned: &banned, stop_token_ids: &stops, min_tokens: 1, ..RowParams::default() };
    let last = RowParams { logit_bias: &[(39_999, 2.0)], ..RowParams::default() };
    let mut all = Adjustments::default();
    all.collect([&row, &row, &last, &last]);
    for r in 0..2 {
        assert_eq!(all.row(r).len(), 40_000);
        assert!((0..).zip(all.row(r)).all(|(token, a)| *a == Adjustment::bias(token, f32::NEG_INFINITY)));
    }
    assert_eq!((all.row(2), all.row(3)), (&[Adjustment::bias(39_999, 2.0)][..], all.row(2)));
}

#[test]
fn no_value_makes_a_logit_nan() {
    let large = crate::params::LARGEST_PENALTY;
    let mut history = History::new(&[1, 2, 3, 1, 2]);
    history.extend([3, 1, 2]);
    for penalty in [large, -large] {
        for (dry_multiplier, dry_base) in [(f32::MAX, 1.0), (f32::MAX, f32::MAX)] {
            let row = RowParams {
                history: Some(&history),
                banned: &[2],
                repetition_penalty: f32::MIN_POSITIVE,
                frequency_penalty: penalty,
                presence_penalty: penalty,
                dry_multiplier,
                dry_base,
                dry_allowed_length: 1,
                ..RowParams::default()
            };
            row.check_values().unwrap();
            let mut all = Adjustments::default();
            all.collect([&row]);
            let item = |token| *all.row(0).iter().find(|a| a.token == token).unwrap();
            for logit in [f32::NEG_INFINITY, f32::MIN, -1.0, 0.0, f32::MAX] {
                assert!([1, 2, 3].iter().all(|&token| !item(token).apply(logit).is_nan()), "{row:?}");
            }
            assert!([1, 2, 3].iter().all(|&token| item(token).apply(f32::NEG_INFINITY) == f32::NEG_INFINITY));
            // The penalty of the token that continues the repetition exceeds every finite logit.
            assert!(
                dry_base == 1.0
                    || item(3)
                        == Adjustment { repetition: f32::MIN_POSITIVE, ..Adjustment::bias(3, f32::NEG_INFINITY) }
            );
        }
    }
    for penalty in [large.next_up(), -large.next_up(), f32::NAN] {
        let row = RowParams { frequency_penalty: penalty, ..RowParams::default() };
        assert!(row.check_values().unwrap_err().to_string().ends_with("but must be between -2^64 and 2^64"));
    }
}

#[test]
fn the_index_leaves_no_item_out() {
    let biases: Vec<(u32, f32)> = (0..500u32).map(|i| (i * i % 997 * 7 + 3000, 1.0)).collect();
    let rows = [&biases[..], &[], &biases[..300], &[(5, 1.0)], &[(u32::MAX, 1.0)]];
    let rows = rows.map(|logit_bias| RowParams { logit_bias, ..RowParams::default() });
    let mut all = Adjustments::default();
    for _ in 0..2 {
        all.collect(&rows);
        assert!(all.indexed(0).starts.is_empty() && all.indexed(4).near(0..1) == all.row(4));
        all.index();
        assert!(!all.indexed(0).starts.is_empty() && all.indexed(4).starts.is_empty());
        for r in 0..rows.len() {
            for tokens in [0..1, 0..4, 0..256, 1000..1030, 4096..5120, 4095..4097, 9000..9256, 20_000..20_001] {
                let inside = |items: &[Adjustment]| items.iter().filter(|a| tokens.contains(&a.token)).count();
                let near = all.indexed(r).near(tokens.clone());
                assert_eq!(inside(near), inside(all.row(r)), "row {r}, {tokens:?}");
                assert!(r != 0 || near.len() < 200, "{tokens:?}");
            }
        }
    }
}

#[test]
fn dry_takes_more_the_longer_the_repetition() {
    let mut history = History::new(&[5, 1, 2, 3, 4, 5, 2, 3, 6, 5]);
    history.extend([1, 2, 3]);
    // 4 continues "5 1 2 3", 6 continues "2 3"; token 6 has a bias too.
    let row = RowParams {
        history: Some(&history),
        dry_multiplier: 0.5,
        dry_base: 2.0,
        dry_allowed_length: 2,
        logit_bias: &[(6, 1.0)],
        ..RowParams::default()
    };
    let mut all = Adjustments::default();
    let last_three = RowParams { dry_penalty_last_n: 3, ..row };
    let broken = RowParams { dry_sequence_breakers: &[1], ..row };
    all.collect([&row, &last_three, &broken, &RowParams { history: None, ..row }]);
    let bias = |subtract| Adjustment { subtract, ..Adjustment::bias(6, 1.0) };
    assert_eq!(all.row(0), [Adjustment { subtract: 2.0, ..Adjustment::none(4) }, bias(0.5)]);
    assert_eq!((all.row(1), all.row(3)), (&[bias(0.0)][..], &[bias(0.0)][..]));
    assert_eq!(all.row(2), [Adjustment { subtract: 0.5, ..Adjustment::none(4) }, bias(0.5)]);
    all.collect_within([&row], 0..6);
    assert_eq!(all.row(0), [Adjustment { subtract: 2.0, ..Adjustment::none(4) }]);
    assert_eq!(power(1.75, 300), f32::INFINITY);
}
