//! Converts the arguments of a call into the parameters of its rows.

use crate::borrow::in_host_memory;
use crate::column::{Column, floats, integers};
use crate::error::{invalid, invalid_in_row, invalid_type};
use crate::history::History;
use crate::params::SamplingParams;
use crate::tensor::Tensor;
use flash_sampling::{History as Tokens, RowParams, SamplingParams as Checked};
use pyo3::prelude::*;
use std::sync::Arc;

/// An optional Python argument.
pub(crate) type Argument<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

fn seeds(object: &Bound<'_, PyAny>, rows: usize) -> PyResult<Column<u64>> {
    integers(object, "seed", rows, "0 to 2^64 - 1")
}

fn positions(object: &Bound<'_, PyAny>, rows: usize) -> PyResult<Column<u64>> {
    integers(object, "position", rows, "0 to 2^56 - 1")
}

/// Refuses one seed and one position for several rows, which would have the same noise.
fn refuse_equal_noise(rows: usize) -> PyResult<()> {
    let fault = "one seed and one position would give all rows the same noise";
    Err(invalid("seed", format!("{fault}: give one seed, or one position, for each of {rows} rows")))
}

/// The parameters of a call that returns only tokens, one column for each argument.
pub(crate) struct Columns {
    pub(crate) rows: usize,
    seed: Column<u64>,
    position: Column<u64>,
    temperature: Column<f32>,
    top_k: Column<i32>,
    top_p: Column<f32>,
    min_p: Column<f32>,
    mask: Option<Mask>,
}

impl Columns {
    /// Reads the arguments of a call with `rows` rows; `knobs` are temperature, top_k, top_p, min_p and mask.
    pub(crate) fn read(
        rows: usize,
        vocab_size: u32,
        seed: &Bound<'_, PyAny>,
        position: &Bound<'_, PyAny>,
        knobs: [Argument<'_, '_>; 5],
    ) -> PyResult<Columns> {
        let [temperature, top_k, top_p, min_p, mask] = knobs;
        let float = |object: Argument<'_, '_>, name, default| {
            object.map_or(Ok(Column::Same(default)), |object| floats(object, name, rows))
        };
        let columns = Columns {
            rows,
            seed: seeds(seed, rows)?,
            position: positions(position, rows)?,
            temperature: float(temperature, "temperature", 1.0)?,
            top_k: match top_k {
                Some(object) => integers(object, "top_k", rows, "-1 to 2^31 - 1")?,
                None => Column::Same(0),
            },
            top_p: float(top_p, "top_p", 1.0)?,
            min_p: float(min_p, "min_p", 0.0)?,
            mask: mask.map(|mask| Mask::read(mask, rows, vocab_size)).transpose()?,
        };
        if let Some(row) = (0..rows).find(|&row| columns.top_k.get(row) < -1) {
            let text = format!("top_k is {}, but must be at least -1", columns.top_k.get(row));
            return Err(invalid_in_row(row, "top_k", text));
        }
        let is_greedy = matches!(columns.temperature, Column::Same(0.0));
        match (&columns.seed, &columns.position) {
            (Column::Same(_), Column::Same(_)) if rows > 1 && !is_greedy => refuse_equal_noise(rows)?,
            _ => {}
        }
        Ok(columns)
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = RowParams<'_>> {
        (0..self.rows).map(|row| RowParams {
            seed: self.seed.get(row),
            position: self.position.get(row),
            temperature: self.temperature.get(row),
            top_k: u32::try_from(self.top_k.get(row)).unwrap_or(0),
            top_p: self.top_p.get(row),
            min_p: self.min_p.get(row),
            mask: self.mask.as_ref().map(|mask| mask.row(row)),
            ..RowParams::default()
        })
    }
}

/// The bitmaps of allowed tokens.
struct Mask {
    /// The number of words of one row's bitmap.
    words: usize,
    /// Whether all rows share one bitmap.
    is_shared: bool,
    bitmap: Vec<u32>,
}

impl Mask {
    fn read(mask: &Bound<'_, PyAny>, rows: usize, vocab_size: u32) -> PyResult<Mask> {
        let mask = Tensor::borrow(&in_host_memory(mask)?, "mask")?;
        let (words, bitmap) = mask.bitmap("mask")?;
        let needed = vocab_size.div_ceil(32) as usize;
        let is_shared = mask.shape.len() == 1 || mask.shape[0] == 1;
        if words < needed || (!is_shared && mask.shape[0] != rows) {
            let shape = &mask.shape;
            let text = format!("mask has shape {shape:?}, but must be [{rows}, {needed}] or [{needed}]");
            return Err(invalid("mask", text));
        }
        Ok(Mask { words, is_shared, bitmap })
    }

    /// Forbids the tokens of a row that another bitmap forbids.
    fn forbid(&mut self, row: usize, allowed: &[u32]) {
        let from = row * self.words;
        let allowed = allowed.iter().copied().chain(core::iter::repeat(0));
        self.bitmap[from..from + self.words].iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
    }

    /// Gives each row its own bitmap.
    fn unshare(&mut self, rows: usize) {
        if core::mem::take(&mut self.is_shared) {
            self.bitmap = self.bitmap.repeat(rows);
        }
    }

    fn row(&self, row: usize) -> &[u32] {
        let from = if self.is_shared { 0 } else { row * self.words };
        &self.bitmap[from..from + self.words]
    }
}

/// The requests of a call that returns all results.
pub(crate) struct Requests {
    params: Vec<Arc<Checked>>,
    seeds: Vec<u64>,
    positions: Column<u64>,
    first_draws: Column<u32>,
    /// Includes the allowed tokens of the requests.
    mask: Option<Mask>,
    histories: Option<Vec<Arc<Tokens>>>,
}

impl Requests {
    /// Reads the arguments of a call with `rows` rows; `arguments` are seed, position, first_draw and mask.
    pub(crate) fn read(
        rows: usize,
        vocab_size: u32,
        params: &Bound<'_, PyAny>,
        histories: Option<Vec<Bound<'_, History>>>,
        arguments: [Argument<'_, '_>; 4],
    ) -> PyResult<Requests> {
        let [seed, position, first_draw, mask] = arguments;
        let count = |knob, len| match len == rows {
            true => Ok(()),
            false => Err(invalid(knob, format!("{knob} has {len} values for {rows} rows"))),
        };
        let one = params.cast::<SamplingParams>();
        let params: Vec<Arc<Checked>> = if let Ok(params) = one {
            vec![params.get().for_vocab(vocab_size, 0)?; rows]
        } else {
            let fault = || invalid_type("params must be a SamplingParams, or a list with one for each row");
            let list: Vec<Bound<'_, SamplingParams>> = params.extract().map_err(|_| fault())?;
            count("params", list.len())?;
            let checked = list.iter().enumerate().map(|(row, params)| params.get().for_vocab(vocab_size, row));
            checked.collect::<PyResult<_>>()?
        };
        let histories: Option<Vec<_>> =
            histories.map(|list| list.iter().map(|history| history.get().snapshot()).collect());
        histories.iter().try_for_each(|histories| count("histories", histories.len()))?;
        let given = seed.map(|seed| seeds(seed, rows)).transpose()?;
        let of_row = |(row, params): (usize, &Arc<Checked>)| {
            params.fields().seed.or(given.as_ref().map(|given| given.get(row))).ok_or_else(|| {
                invalid_in_row(row, "seed", "neither the row's SamplingParams nor the argument seed has a seed")
            })
        };
        let seeds = params.iter().enumerate().map(of_row).collect::<PyResult<Vec<u64>>>()?;
        let positions = match (position, &histories) {
            (Some(position), _) => positions(position, rows)?,
            (None, Some(list)) => Column::Each(list.iter().map(|tokens| tokens.tokens().len() as u64).collect()),
            (None, None) => {
                let text = "position must be given, or histories, whose lengths are the positions";
                return Err(invalid("position", text));
            }
        };
        let has_one_seed = one.is_ok_and(|params| params.get().has_seed() || matches!(given, Some(Column::Same(_))));
        let is_greedy = params.iter().all(|params| params.fields().temperature == 0.0);
        if rows > 1 && has_one_seed && matches!(positions, Column::Same(_)) && !is_greedy {
            refuse_equal_noise(rows)?;
        }
        let first_draws = match first_draw {
            Some(object) => integers(object, "first_draw", rows, "0 to 2^32 - 1")?,
            None => Column::Same(0),
        };
        let mut mask = mask.map(|mask| Mask::read(mask, rows, vocab_size)).transpose()?;
        let mut requests = Requests { params, seeds, positions, first_draws, mask: None, histories };
        if let Some(mask) = &mut mask {
            let allowed = requests.params().enumerate().filter_map(|(row, params)| Some((row, params.mask?)));
            for (row, allowed) in allowed {
                mask.unshare(rows);
                mask.forbid(row, allowed);
            }
        }
        requests.mask = mask;
        Ok(requests)
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = RowParams<'_>> {
        self.params.iter().enumerate().map(|(row, params)| {
            let history = self.histories.as_ref().map(|histories| &*histories[row]);
            let params = params.row(self.seeds[row], self.positions.get(row), history);
            let mask = self.mask.as_ref().map(|mask| mask.row(row)).or(params.mask);
            RowParams { first_draw: self.first_draws.get(row), mask, ..params }
        })
    }
}
