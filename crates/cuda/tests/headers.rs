//! Compares the CUDA headers with the core, bit by bit. The system's C++ compiler builds the headers.

use crate::emulated::{self, Input, Output};
use flash_sampling_core::backend::{Adjustment, MassHistogram, RowTransform, Winner, math};
use flash_sampling_core::noise::granule::Granule;
use flash_sampling_core::noise::log::{ln, neg_ln_1m};
use flash_sampling_core::noise::uniform;
use flash_sampling_core::{Domain, Head, Matrix, Noise};

/// Returns word `i` of the input stream, which both sides use.
fn input(i: u32) -> u32 {
    Noise::new(1, 2).unwrap().word(Domain::Generator, 3, i)
}

struct Expected(Output);

impl Expected {
    fn word(&mut self, what: &str, i: u32, want: u32) {
        let found: u32 = self.0.take();
        assert_eq!(found, want, "{what} of input {i}: {:e} against {:e}", f32::from_bits(found), f32::from_bits(want));
    }
    fn float(&mut self, what: &str, i: u32, want: f32) {
        self.word(what, i, want.to_bits());
    }
    fn long(&mut self, what: &str, i: u32, want: u64) {
        self.word(what, i, want as u32);
        self.word(what, i, (want >> 32) as u32);
    }
}

fn noise(out: &mut Expected) {
    for i in 0..4000 {
        let position = (u64::from(input(i + 2)) * 0x100_0001) & 0xff_ffff_ffff_ffff;
        let noise = Noise::new((u64::from(input(i)) << 32) | u64::from(input(i + 1)), position).unwrap();
        let domain = Domain::ALL[i as usize % 10];
        for word in noise.words(domain, i, input(i + 3)) {
            out.word("words", i, word);
        }
        out.word("word", i, noise.word(domain, i, input(i + 4)));
        out.word("refinement", i, noise.refinement(domain, i, input(i + 4)));
        out.float("gumbel", i, noise.gumbel(domain, i, input(i + 4)));
        out.long("coin", i, noise.coin(i, input(i + 5)).to_bits());
        let word = match i {
            0..300 => i,
            300..310 => !(i - 300),
            _ => input(i) >> (i % 32),
        };
        let refinement = || input(i + 6);
        out.float("gumbel_of_word", i, uniform::gumbel(word, refinement));
        let granule = Granule::of_word((word << 4) | (i % 16), refinement);
        out.word("leader", i, granule.leader);
        out.float("minimum", i, granule.minimum);
        out.float("exponential", i, granule.exponential(i / 16, || word));
        out.float("largest gumbel", i, granule.largest_gumbel());
        let domain = if i % 2 == 1 { Domain::Token } else { Domain::Residual };
        for token in (0..4).map(|j| (input(i + 4) & !3) + j) {
            out.float("one of four gumbels", i, noise.gumbel(domain, i, token));
        }
    }
}

fn floats(out: &mut Expected) {
    for i in 0..20_000 {
        let x = f32::from_bits(input(i));
        let x = if x.is_finite() { x } else { 1.0 };
        let unit = (input(i + 1) as f32 + 0.5) * 2f32.powi(-33);
        out.float("ln", i, ln(if x > 1e-37 { x } else { unit }));
        out.float("neg_ln_1m", i, neg_ln_1m(unit));
        out.float("exp", i, math::exp(x));
        out.float("exp", i, math::exp((unit - 0.25) * 400.0));
        out.float("tanh", i, math::tanh(x));
        out.float("tanh", i, math::tanh((unit - 0.25) * 8.0));
        let winner = Winner::new(x, i);
        out.long("ordered bits", i, winner.to_ordered_bits());
        out.float("score", i, winner.score);
        out.word("token", i, winner.token);
        let head = |bias| {
            let head = Head::new(Matrix::new(&[0.0f32], 1, 1).unwrap()).unwrap();
            let mut dot = [x];
            match bias {
                Some(bias) => {
                    let bias = [bias];
                    let head = head.with_bias(&bias).unwrap().with_soft_cap(30.0).unwrap().with_scale(0.5).unwrap();
                    head.transform(0, &mut dot);
                }
                None => head.transform(0, &mut dot),
            }
            dot[0]
        };
        out.float("head", i, head(Some(unit)));
        out.float("plain head", i, head(None));
        let mask = [input(i), input(i + 2), input(i + 3)];
        let bias = [(3, 1.5), (17, -2.25), (90, x)].map(|(token, value)| Adjustment::bias(token, value));
        let row = RowTransform { mask: Some(&mask), adjustments: &bias, inv_temperature: 0.7 };
        let mut logit = [x];
        row.apply(input(i + 4) % 100, &mut logit);
        out.float("row", i, logit[0]);
        out.float("plain row", i, x);
        let list = [(3, 1.5, 1.3, 0.0), (17, -2.25, 0.7, -0.75), (90, x, 1.0, unit)];
        let list = list.map(|(token, bias, repetition, subtract)| Adjustment { token, bias, repetition, subtract });
        let mut logit = [x];
        RowTransform { mask: None, adjustments: &list, inv_temperature: 0.7 }
            .apply(list[i as usize % 3].token, &mut logit);
        out.float("penalised row", i, logit[0]);
        for l in [(unit - 0.25) * 200.0, x] {
            mass(out, i, l);
        }
    }
}

/// Appends edge, slot and units of one logit, from the words of a histogram of this logit alone.
fn mass(out: &mut Expected, i: u32, logit: f32) {
    let mut histogram = MassHistogram::default();
    histogram.push(logit);
    let mut words = Vec::new();
    histogram.to_words(&mut words);
    let slot = words[1..].iter().position(|&mass| mass > 0).unwrap();
    out.word("edge", i, words[0] as u32);
    out.word("slot", i, slot as u32);
    out.long("units", i, words[1 + slot]);
}

#[test]
fn the_headers_have_the_bits_of_the_core() {
    let Some(program) = emulated::program("headers") else { return };
    let mut out = Expected(emulated::answer(&program, Input::default()));
    noise(&mut out);
    floats(&mut out);
    out.word("tokens wrongly pruned", 0, 0);
    out.word("runs of tokens that do not fit", 0, 0);
    out.word("tokens that a schedule has not once or does not find again", 0, 0);
    out.word("chunks that meet in a bank or in a place", 0, 0);
    out.word("bounds of noise that are none or not close", 0, 0);
    out.word("keys of draws that are not in order or do not give their draw back", 0, 0);
    out.word("logits that min-p keeps below their threshold", 0, 0);
    out.word("estimates of the least logit of a top-k", 0, 0);
    out.word("logits that the largest of their granules hide or overstate", 0, 0);
    assert!(out.0.is_empty());
}
