//! Runs the draw kernels on the processor. The system's C++ compiler builds them with a small emulator of a block's
//! threads, and the tests compare every draw with the core's reference.

use crate::emulated::{self, Input};
use crate::inputs;
use flash_sampling_core::backend::{Adjustment, Candidate, RowTransform, first_invalid};
use flash_sampling_core::reference::{grouped, groups, log_mass, online, tiled};
use flash_sampling_core::{Domain, Head, Matrix, Noise, RowError};
use std::path::PathBuf;
use std::sync::LazyLock;

const FRESH: u32 = 0;
const ONLINE: u32 = 1;
const MAXIMA: u32 = 2;
const FUSED: u32 = 3;
const EXISTING_F32: u32 = 4;
const EXISTING_BF16: u32 = 5;

/// Returns word `i` of the input stream.
fn input(i: u32) -> u32 {
    Noise::new(3, 5).unwrap().word(Domain::Generator, 7, i)
}

/// Returns a row's dot product of a shape.
fn dot(shape: u32, i: u32) -> f32 {
    let normal = inputs::normal(input, i);
    match shape % 6 {
        0 => normal,
        1 => 0.0,
        2 => (normal * 3.0).round(),
        3 if i.is_multiple_of(97) => 18.0 + normal,
        3 => normal * 2.5,
        4 => normal * 300.0,
        _ => normal * 1e8,
    }
}

#[derive(Debug)]
struct RowCase {
    seed: u64,
    position: u64,
    inv_temperature: f32,
    draw: u32,
    greedy: bool,
    mask: Option<Vec<u32>>,
    bias: Vec<(u32, f32)>,
    dots: Vec<f32>,
}

#[derive(Debug)]
struct Case {
    tokens: u32,
    first: u32,
    size: u32,
    blocks: u32,
    /// Tokens per launch; 0 = all. If it is 0, existing logits are aligned.
    part: u32,
    rule: u32,
    soft_cap: f32,
    scale: f32,
    bias: Vec<f32>,
    rows: Vec<RowCase>,
}

impl Case {
    fn write(&self, out: &mut Input) {
        out.put([self.rows.len() as u32, self.tokens, self.first, self.size, self.blocks, self.part, self.rule]);
        out.put([self.soft_cap, self.scale]);
        out.put_all(self.bias.iter().copied());
        for row in &self.rows {
            out.put([row.seed, row.position]);
            out.put([row.inv_temperature.to_bits(), row.draw, row.greedy.into()]);
            let mask = row.mask.as_deref().unwrap_or_default();
            out.put(mask.len() as u32);
            out.put_all(mask.iter().copied());
            out.put(row.bias.len() as u32);
            out.put_all(row.bias.iter().map(|&(token, value)| [token, value.to_bits()]));
        }
        out.put_all(self.rows.iter().flat_map(|row| row.dots.iter().copied()));
    }

    /// Returns the reference's draw and log Z.
    fn expected(&self, row: &RowCase) -> Result<(Candidate, f64), RowError> {
        let weight = vec![0.0f32; self.tokens as usize];
        let matrix = Matrix::new(&weight, self.tokens as usize, 1).unwrap();
        let mut head = Head::shard(matrix, self.first as usize, (self.first + self.tokens) as usize).unwrap();
        if self.soft_cap > 0.0 {
            head = head.with_soft_cap(self.soft_cap).unwrap();
        }
        let head = head.with_scale(self.scale).unwrap().with_bias(&self.bias).unwrap();
        let mut logits = row.dots.clone();
        head.transform(self.first, &mut logits);
        if self.rule == EXISTING_BF16 {
            logits.iter_mut().for_each(|l| *l = f32::from_bits(l.to_bits() & 0xffff_0000));
        }
        first_invalid(self.first, &logits).map_or(Ok(()), Err)?;
        let adjustments: Vec<_> = row.bias.iter().map(|&(token, value)| Adjustment::bias(token, value)).collect();
        let transform =
            RowTransform { mask: row.mask.as_deref(), adjustments: &adjustments, inv_temperature: row.inv_temperature };
        transform.apply(self.first, &mut logits);
        first_invalid(self.first, &logits).map_or(Ok(()), Err)?;
        if logits.iter().all(|&l| l == f32::NEG_INFINITY) {
            return Err(RowError::NoFiniteLogit);
        }
        let noise = Noise::new(row.seed, row.position).unwrap();
        let checked = inputs::row(noise, row.greedy, transform, row.draw);
        let parts = groups(self.first..self.first + self.tokens, self.size);
        let candidate = match self.rule {
            _ if row.greedy => tiled(&checked, row.draw, &logits, self.first),
            FRESH => grouped(&checked, row.draw, &logits, self.first, parts, Domain::Group),
            ONLINE => online(&checked, row.draw, &logits, self.first, parts),
            _ => tiled(&checked, row.draw, &logits, self.first),
        };
        Ok((candidate, log_mass(&logits)))
    }
}

fn cases(rules: [u32; 3]) -> Vec<Case> {
    let mut cases = Vec::new();
    // Tokens, first token, group size, blocks, tokens per launch.
    let shapes = [
        (1, 0, 64, 1, 0),
        (63, 0, 64, 1, 0),
        (64, 64, 64, 5, 0),
        (777, 0, 64, 3, 0),
        (1003, 0, 128, 7, 256),
        (1003, 70, 64, 4, 192),
        (900, 1021, 64, 2, 0),
        (2050, 0, 512, 5, 0),
        (2050, 513, 1024, 9, 1024),
        (1500, 3, 4096, 20, 0),
        (640, 128, 128, 10, 128),
        // Warps with more tokens than they compute words for at a time.
        (19_001, 31, 8192, 1, 0),
        (10_007, 64, 512, 1, 512),
    ];
    let mut next = 0u32;
    for (i, (tokens, first, size, blocks, part)) in (0u32..).zip(shapes) {
        for rule in rules {
            let row = |r: u32| {
                let at = next + r * 10_000;
                let dots: Vec<f32> = (0..tokens).map(|t| dot(i + r + rule, at + t)).collect();
                let words = (first + tokens).div_ceil(32);
                let base = RowCase {
                    seed: u64::from(r / 2) << 33 | 5,
                    position: (1 << 40) + u64::from(r),
                    inv_temperature: [1.0, 0.75, 2.5][r as usize % 3],
                    draw: r % 5,
                    greedy: false,
                    mask: None,
                    bias: Vec::new(),
                    dots,
                };
                match r {
                    2 => RowCase { greedy: true, inv_temperature: 1.0, ..base },
                    3 => RowCase { mask: Some((0..words).map(|w| input(at + w)).collect()), ..base },
                    4 => RowCase { mask: Some(vec![0; words as usize]), ..base },
                    5 => RowCase {
                        bias: vec![(first, 3.0), (first + tokens / 2 + 1, f32::NEG_INFINITY)],
                        mask: Some(vec![!0; (words as usize).div_ceil(2)]),
                        ..base
                    },
                    6 => {
                        let mut row = base;
                        row.dots[tokens as usize / 2] = f32::NAN;
                        row
                    }
                    7 => {
                        let mut row = base;
                        row.dots[tokens as usize - 1] = f32::INFINITY;
                        row.dots[tokens as usize / 3] = f32::NEG_INFINITY;
                        row
                    }
                    _ => base,
                }
            };
            let rows = (0..13).map(row).collect();
            let is_capped = (i + rule) % 3 == 1;
            let bias = (0..tokens).map(|t| if is_capped { (t % 7) as f32 * 0.25 } else { 0.0 }).collect();
            let soft_cap = if is_capped { 20.0 } else { 0.0 };
            let scale = if i % 4 == 2 { 0.5 } else { 1.0 };
            cases.push(Case { tokens, first, size, blocks, part, rule, soft_cap, scale, bias, rows });
            next = next.wrapping_add(200_000);
        }
    }
    cases
}

#[test]
fn the_kernels_of_groups_draw_what_the_reference_draws() {
    draws_are_the_references([FRESH, ONLINE, MAXIMA]);
}

#[test]
fn the_kernels_of_rows_draw_what_the_reference_draws() {
    draws_are_the_references([FUSED, EXISTING_F32, EXISTING_BF16]);
}

fn draws_are_the_references(rules: [u32; 3]) {
    static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| emulated::program("draws"));
    let Some(program) = &*PROGRAM else { return };
    let cases = cases(rules);
    let mut input = Input::default();
    input.put(cases.len() as u32);
    cases.iter().for_each(|case| case.write(&mut input));
    let mut found = emulated::answer(program, input);
    let (mut drawn, mut invalid) = (0, 0);
    for case in &cases {
        let draws: Vec<[u32; 4]> = found.list(case.rows.len());
        for (r, (row, [token, score, logit, status])) in case.rows.iter().zip(draws).enumerate() {
            let log_z: f64 = found.take();
            let what = || {
                let Case { tokens, first, size, blocks, part, rule, .. } = case;
                format!(
                    "{tokens} tokens from {first}, groups of {size}, {blocks} blocks, parts of {part}, rule {rule}, row {r}"
                )
            };
            match case.expected(row) {
                Ok((want, want_z)) => {
                    let want = (want.winner.token, want.winner.score.to_bits(), want.logit.to_bits(), 0);
                    assert_eq!((token, score, logit, status), want, "{}", what());
                    let error = (log_z - want_z).abs();
                    let is_close = case.rule >= FUSED || error <= 1e-8 + 1e-15 * want_z.abs();
                    assert!(is_close, "log Z {log_z}, {want_z}: {}", what());
                    drawn += 1;
                }
                Err(RowError::NaN { token: want }) => assert_eq!((token, status), (want, 2), "{}", what()),
                Err(RowError::PositiveInfinity { token: want }) => assert_eq!((token, status), (want, 3), "{}", what()),
                Err(error) => assert_eq!((status, error), (1, RowError::NoFiniteLogit), "{}", what()),
            }
            invalid += u32::from(status != 0);
        }
    }
    assert!(found.is_empty());
    assert!(drawn > 250 && invalid > 60, "{drawn} drawn, {invalid} invalid");
}
