//! The examples of docs/filters.md and docs/groups.md.

use flash_sampling_core::backend::{Adjustments, GroupSummary, LogMass};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Domain, Head, History, Matrix, Noise, Order, PerturbedArgmax, Plan, RowParams, Samples};

/// Returns the tokens of a head that the filters of `row` keep, ascending.
fn kept(logits: &[f32], row: RowParams<'_>) -> Vec<u32> {
    let head = Head::new(Matrix::new(logits, logits.len(), 1).unwrap()).unwrap();
    let mut out = Samples::new();
    let rows = [RowParams { kept: true, ..row }];
    let mut reference = Reference::new(head, Plan::default(), ReferenceVariant::Tiled);
    reference.sample(Matrix::new(&[1f32], 1, 1).unwrap(), &rows, &mut out).unwrap();
    let words = out.row(0).unwrap().kept.unwrap().tokens;
    (0..logits.len() as u32).filter(|&token| words[(token / 32) as usize] >> (token % 32) & 1 == 1).collect()
}

#[test]
fn coins_have_the_values_of_the_page() {
    let noise = Noise::new(7, 3).unwrap();
    for (draw, group, words, coin) in [
        (0, 1, [0x17bb_30d2, 0x2df0_7ef2], 0.092_700_053_513_853_56),
        (0, 5, [0x647b_aec6, 0xbc0b_a224], 0.392_512_248_534_372_2),
        (2, 5, [0x849f_3a0f, 0xa2ba_2dd8], 0.518_054_608_170_793_7),
    ] {
        assert_eq!(noise.words(Domain::MergeCoin, draw, group)[..2], words);
        assert_eq!(noise.coin(draw, group), coin);
    }
    assert_eq!(noise.xtc_coin(), 0.574_849_840_678_697_2);
    assert_eq!(noise.coin_of(Domain::Accept, 0, 0), 0.266_564_564_605_259_24);
    let gumbel = |domain, draw, index| format!("{:.5}", noise.gumbel(domain, draw, index));
    let of = [(0, 1), (0, 5), (2, 5)].map(|(d, i)| [gumbel(Domain::Group, d, i), gumbel(Domain::Shard, d, i)]);
    assert_eq!(of, [["0.28729", "-1.75482"], ["1.01702", "1.41178"], ["1.21444", "1.11774"]]);
    let mass = |logit: f32| LogMass::of_slice(&[logit; 64]);
    let first = GroupSummary::EMPTY.merge(GroupSummary { mass: mass(0.0), sample: Some(0) }, noise.coin(0, 0));
    assert!((first.mass.replace_probability(&mass(3f32.ln())) - 0.75).abs() < 1e-7);
    assert!(first.takes(&mass(3f32.ln()), noise.coin(0, 1)));
}

#[test]
fn filters_keep_the_tokens_of_the_page() {
    let logits = [2.0f32, 3.0, 3.0, 1.0, 1.0, 1.0, 9.0, 0.0];
    let row = RowParams { mask: Some(&[0b1011_1111]), ..RowParams::default() };
    let xtc = |xtc_threshold| RowParams { xtc_threshold, xtc_probability: 1.0, ..row };
    let typical = |typical_p| RowParams { typical_p, ..row };
    let (two, hot) = (RowParams { min_p: 0.3, top_p: 0.8, ..row }, RowParams { min_p: 0.3, temperature: 2.0, ..row });
    let all = [0, 1, 2, 3, 4, 5, 7];
    for (row, tokens) in [
        (RowParams { top_k: 4, ..row }, &[0, 1, 2, 3][..]),
        (RowParams { top_p: 0.75, ..row }, &[0, 1, 2]),
        (RowParams { min_p: 0.13, ..row }, &[0, 1, 2, 3, 4, 5]),
        (RowParams { top_n_sigma: 1.0, ..row }, &[0, 1, 2]),
        (RowParams { epsilon_cutoff: 0.045, ..row }, &[0, 1, 2, 3, 4, 5]),
        (RowParams { epsilon_cutoff: 0.9, ..row }, &[1]),
        (xtc(0.3), &[0, 2, 3, 4, 5, 7]),
        (xtc(0.04), &[5, 7]),
        (xtc(0.9), &all),
        (typical(0.3), &[2]),
        (typical(0.5), &[1, 2]),
        (typical(0.75), &[0, 1, 2]),
        (typical(0.9), &[0, 1, 2, 3, 4]),
        (two, &[1, 2]),
        (RowParams { order: Order::HuggingFace, ..two }, &[0, 1, 2]),
        (RowParams { order: Order::LlamaCpp, ..two }, &[0, 1, 2]),
        (hot, &[0, 1, 2, 3, 4, 5]),
        (RowParams { order: Order::LlamaCpp, ..hot }, &[0, 1, 2]),
        (row, &all),
    ] {
        assert_eq!(kept(&logits, row), tokens, "{row:?}");
    }
    let row = RowParams::default();
    let of_equals = |row| kept(&[1.0; 4], row);
    assert_eq!(of_equals(RowParams { epsilon_cutoff: 0.25, ..row }), [0, 1, 2, 3]);
    assert_eq!(of_equals(RowParams { epsilon_cutoff: 0.25f32.next_up(), ..row }), [0]);
    assert_eq!(of_equals(RowParams { top_p: 0.5, ..row }), [0, 1]);
    assert_eq!(of_equals(RowParams { xtc_probability: 1.0, ..row }), [3]);
}

#[test]
fn penalties_change_logits_as_on_the_page() {
    let mut history = History::new(&[1, 2]);
    history.extend([2, 3, 3]);
    let row = RowParams {
        history: Some(&history),
        logit_bias: &[(1, 0.5), (3, -1.0)],
        repetition_penalty: 1.5,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..RowParams::default()
    };
    let mut all = Adjustments::default();
    all.collect([&row]);
    let changed = all.row(0).iter().map(|a| (a.token, format!("{:.4}", a.apply(3.0)), a.apply(-3.0)));
    let want = [(1, "2.3333", -3.75), (2, "1.2500", -5.25), (3, "0.0833", -7.25)];
    assert_eq!(changed.collect::<Vec<_>>(), want.map(|(token, plus, minus)| (token, plus.to_owned(), minus)));
}
