//! Runs blocks of the fused Hopper kernel on the processor. The system's C++ compiler builds the kernel's own headers
//! with an emulator of its threads, barriers, copies and products. The tests compare every draw and list with core's
//! reference.

mod scaled;
mod shadow;
mod shadow_lists;

use crate::emulated::{self, Input};
use crate::inputs;
use flash_sampling_core::backend::{Adjustment, Row, RowTransform, first_invalid};
use flash_sampling_core::reference::tiled;
use flash_sampling_core::{Domain, Head, Matrix, Noise, RowError};
use std::path::PathBuf;
use std::sync::LazyLock;

/// The program of all tests here.
static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| emulated::program("fused_hopper"));

const PLAIN: u32 = 0;
const MASKS_PENALTIES: u32 = 1;
const LISTS: u32 = 2;
const ROOM: usize = 8192;

/// Returns word `i` of the input stream.
fn input(i: u32) -> u32 {
    Noise::new(5, 7).unwrap().word(Domain::Generator, 1, i)
}

struct RowCase {
    seed: u64,
    inv_temperature: f32,
    draw: u32,
    greedy: bool,
    top_k: u32,
    ln_min_p: f64,
    top_p: f32,
    mask: Vec<u32>,
    bias: Vec<(u32, f32)>,
}

struct Launch {
    columns: u32,
    variant: u32,
    tokens: u32,
    first: u32,
    hidden: u32,
    blocks: u32,
    is_backwards: bool,
    soft_cap: f32,
    scale: f32,
    bias: Vec<f32>,
    weight: Vec<f32>,
    states: Vec<f32>,
    rows: Vec<RowCase>,
}

impl Launch {
    /// Creates rows of every kind, with integer inputs whose dot products are exact.
    fn new(at: u32, [columns, rows, tokens, first, hidden, blocks]: [u32; 6], variant: u32) -> Launch {
        let small = |i: u32| (input(at * 1_000_003 + i) % 5) as f32 - 2.0;
        let mut states: Vec<_> = (0..rows * hidden).map(|i| small(i + (1 << 28))).collect();
        let row = |r: u32| RowCase {
            seed: u64::from(at) << 33 | u64::from(r),
            inv_temperature: [1.0, 0.0625, 0.25, 0.001, 0.02, 0.11, 4.0][r as usize % 7],
            draw: r % 3,
            greedy: r % 8 == 7,
            top_k: if variant == LISTS && r % 4 == 1 { 20 } else { 0 },
            ln_min_p: if variant == LISTS && r % 4 == 2 { -2.0 - f64::from(r % 40) / 8.0 } else { f64::NEG_INFINITY },
            top_p: 1.0,
            mask: match r % 6 {
                4 => (0..(first + tokens).div_ceil(32)).map(|w| input(w + r) & input(w + r + 99)).collect(),
                5 if r % 12 == 5 => vec![1 << 9; (first + tokens) as usize / 33],
                _ => Vec::new(),
            },
            bias: if r % 5 == 3 { vec![(first, 9.0), (first + tokens / 2 + 1, f32::NEG_INFINITY)] } else { vec![] },
        };
        if rows > 14 {
            states[(13 * hidden) as usize] = f32::NAN;
        }
        Launch {
            columns,
            variant,
            tokens,
            first,
            hidden,
            blocks,
            is_backwards: at % 2 == 1,
            soft_cap: if at % 3 == 2 { 40.0 } else { 0.0 },
            scale: if at % 4 == 3 { 0.5 } else { 1.0 },
            bias: (0..tokens).map(|t| if at % 3 == 1 { (t % 7) as f32 * 0.25 } else { 0.0 }).collect(),
            weight: (0..tokens * hidden).map(small).collect(),
            states,
            rows: (0..rows).map(row).collect(),
        }
    }

    fn write(&self, bound_factor: f32, out: &mut Input) {
        out.put([self.columns, self.variant, self.is_backwards.into(), self.rows.len() as u32]);
        out.put([self.tokens, self.first, self.hidden, self.blocks]);
        out.put([bound_factor, self.soft_cap, self.scale]);
        out.put_all(self.bias.iter().copied());
        // Small integers and NaN are exact in bf16.
        out.put_all(self.weight.iter().chain(&self.states).map(|x| (x.to_bits() >> 16) as u16));
        for row in &self.rows {
            out.put([row.seed, row.seed + 3]);
            out.put([row.inv_temperature.to_bits(), row.draw, row.greedy.into(), row.top_k]);
            out.put(row.ln_min_p);
            out.put([row.top_p.to_bits(), row.mask.len() as u32]);
            out.put_all(row.mask.iter().copied());
            out.put(row.bias.len() as u32);
            out.put_all(row.bias.iter().map(|&(token, value)| [token, value.to_bits()]));
        }
    }

    /// Returns the transformed logits of a row.
    fn logits(&self, r: usize) -> Result<Vec<f32>, RowError> {
        let hidden = self.hidden as usize;
        let state = &self.states[r * hidden..][..hidden];
        let dots = self.weight.chunks(hidden).map(|w| w.iter().zip(state).map(|(a, b)| a * b).sum());
        let mut logits: Vec<f32> = dots.collect();
        let none = vec![0.0; self.tokens as usize];
        let matrix = Matrix::new(&none, none.len(), 1).unwrap();
        let mut head = Head::shard(matrix, self.first as usize, (self.first + self.tokens) as usize).unwrap();
        if self.soft_cap > 0.0 {
            head = head.with_soft_cap(self.soft_cap).unwrap();
        }
        head.with_scale(self.scale).unwrap().with_bias(&self.bias).unwrap().transform(self.first, &mut logits);
        first_invalid(self.first, &logits).map_or(Ok(()), Err)?;
        let bias = &self.rows[r].bias;
        let adjustments: Vec<_> = bias.iter().map(|&(token, value)| Adjustment::bias(token, value)).collect();
        self.row(r, &adjustments).transform.apply(self.first, &mut logits);
        if logits.iter().all(|&l| l == f32::NEG_INFINITY) { Err(RowError::NoFiniteLogit) } else { Ok(logits) }
    }

    fn row<'a>(&'a self, r: usize, adjustments: &'a [Adjustment]) -> Row<'a> {
        let row = &self.rows[r];
        let mask = (!row.mask.is_empty()).then_some(&*row.mask);
        // Listed rows have no noise.
        let greedy = row.greedy || row.top_k > 0 || row.ln_min_p > f64::NEG_INFINITY;
        let transform = RowTransform { mask, adjustments, inv_temperature: row.inv_temperature };
        inputs::row(Noise::new(row.seed, row.seed + 3).unwrap(), greedy, transform, row.draw)
    }

    /// Returns token, score, logit and status of a row.
    fn expected(&self, r: usize) -> [u32; 4] {
        match self.logits(r) {
            Ok(logits) => {
                let best = tiled(&self.row(r, &[]), self.rows[r].draw, &logits, self.first);
                [best.winner.token, best.winner.score.to_bits(), best.logit.to_bits(), 0]
            }
            Err(RowError::NaN { token }) => [token, 0, 0, 2],
            Err(RowError::PositiveInfinity { token }) => [token, 0, 0, 3],
            Err(_) => [u32::MAX, f32::NEG_INFINITY.to_bits(), f32::NEG_INFINITY.to_bits(), 1],
        }
    }

    /// Checks that every token at or above the cutoff is listed once, that no token is listed twice, and that logits
    /// are right. Returns whether the list is shorter than the row.
    fn check_list(&self, r: usize, cut: u32, keys: &[u64]) -> bool {
        let row = &self.rows[r];
        let Ok(logits) = self.logits(r) else { return false };
        if row.greedy || (row.top_k == 0 && row.ln_min_p == f64::NEG_INFINITY) {
            assert!(keys.is_empty());
            return false;
        }
        let monotone = |x: f32| if x.is_sign_negative() { !x.to_bits() } else { x.to_bits() | 1 << 31 };
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let least = if row.top_k > 0 { f64::NEG_INFINITY } else { f64::from(largest) + row.ln_min_p };
        let mut listed = vec![0; logits.len()];
        for key in keys {
            let at = (!(*key as u32) - self.first) as usize;
            assert_eq!((key >> 32) as u32, monotone(logits[at] + 0.0), "row {r}, token {at}");
            listed[at] += 1;
        }
        for (at, (&logit, &times)) in logits.iter().zip(&listed).enumerate() {
            let is_kept = f64::from(logit) >= least && monotone(logit) >= cut && logit > f32::NEG_INFINITY;
            assert!(times <= 1 && (times == 1 || !is_kept), "row {r}, token {at} is listed {times} times");
        }
        keys.len() < logits.iter().filter(|l| **l > f32::NEG_INFINITY).count()
    }
}

/// Whether a draw differs. The score of an invalid row is not compared.
fn is_wrong(draw: [u32; 4], want: [u32; 4]) -> bool {
    draw != want && (want[3] < 2 || draw[0] != want[0] || draw[3] != want[3])
}

fn launches() -> Vec<Launch> {
    let shapes = [
        // Columns, rows, tokens, first token, hidden, blocks.
        [8, 1, 700, 0, 64, 2],
        [8, 3, 700, 37, 72, 1],
        [8, 8, 2000, 16, 128, 3],
        [8, 8, 2999, 5, 40, 6],
        [16, 9, 700, 16, 64, 6],
        [16, 16, 333, 47, 8, 2],
        [32, 20, 700, 37, 64, 2],
        [32, 20, 2100, 32, 136, 4],
        [32, 27, 15, 1, 16, 1],
        [32, 32, 1, 3, 64, 1],
        [96, 40, 900, 0, 64, 3],
        [96, 90, 600, 21, 40, 2],
        [192, 150, 330, 0, 64, 2],
        [256, 200, 200, 37, 40, 1],
        [8, 8, 3000, 64, 8192, 2],
    ];
    let every = |variant| (0..).zip(shapes).map(move |(at, shape)| Launch::new(at + 20 * variant, shape, variant));
    // Enough tokens and blocks that top-k has a cutoff.
    let more = (0..2).map(|at| Launch::new(70 + at, [16, 12, 5000, 48 + at, 40, 16], LISTS));
    [PLAIN, MASKS_PENALTIES, LISTS].into_iter().flat_map(every).chain(more).collect()
}

#[test]
fn the_blocks_draw_and_list_what_the_reference_does() {
    let Some(program) = &*PROGRAM else { return };
    let launches = launches();
    let wrong_draws = |bound_factor: f32| {
        let mut input = Input::default();
        input.put(launches.len() as u32);
        launches.iter().for_each(|launch| launch.write(bound_factor, &mut input));
        let mut found = emulated::answer(program, input);
        let (mut wrong, mut short, mut full, mut cuts) = (Vec::new(), 0, 0, 0);
        for (at, launch) in launches.iter().enumerate() {
            for r in 0..launch.rows.len() {
                let (draw, want) = (found.take::<[u32; 4]>(), launch.expected(r));
                if launch.variant == LISTS {
                    let [count, cut]: [u32; 2] = found.take();
                    let count = count as usize;
                    cuts += u32::from(cut > 0);
                    let keys: Vec<u64> = found.list(count.min(ROOM));
                    // The host decides a row whose list is full.
                    if count > ROOM {
                        full += 1;
                        continue;
                    }
                    short += u32::from(launch.check_list(r, cut, &keys));
                }
                if is_wrong(draw, want) {
                    wrong.push((at, r, draw, want));
                }
            }
        }
        let seen = format!("{short} short lists, {full} full ones, {cuts} cutoffs");
        assert!(found.is_empty() && short > 20 && full < 5 && cuts > 5, "{seen}");
        wrong
    };
    let wrong = wrong_draws(1.0);
    assert!(wrong.is_empty(), "{} wrong draws: {:x?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    // The negative control: bounds below the noise lose winners.
    assert!(wrong_draws(0.5).len() > 10);
}
