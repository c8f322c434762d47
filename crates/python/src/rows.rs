//! Converts the arguments of a call into the parameters of its rows.

use crate::borrow::in_host_memory;
use crate::column::{Column, floats, integers};
use crate::error::{RowErrors, invalid, invalid_type};
use crate::history::History;
use crate::params::SamplingParams;
use crate::tensor::Tensor;
use flash_sampling::{History as Tokens, RowParams, SamplingParams as Checked, SamplingParamsBuilder};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// An optional Python argument.
pub(crate) type Argument<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// Reads the seeds of rows.
fn seeds(object: &Bound<'_, PyAny>, rows: (usize, &mut RowErrors)) -> PyResult<Column<u64>> {
    integers(object, "seed", rows, (0, "0 to 2^64 - 1"))
}

/// Reads the positions of rows.
fn positions(object: &Bound<'_, PyAny>, rows: (usize, &mut RowErrors)) -> PyResult<Column<u64>> {
    integers(object, "position", rows, (0, "0 to 2^56 - 1"))
}

/// Adds an error for each row that has the position and the first draw of an earlier row. The rows have one seed, so
/// the noise of these rows would be equal. `places` has the number, the position and the first draw of each row.
fn refuse_equal_noise(places: Vec<(usize, u64, u32)>, errors: &mut RowErrors) {
    let mut seen = HashMap::new();
    for (row, position, first_draw) in places {
        let earlier = *seen.entry((position, first_draw)).or_insert(row);
        if earlier != row {
            let text =
                format!("the row has the seed and the position of row {earlier}, so it would have the same noise");
            errors.add(row, "seed", format!("{text}: give each row a seed or a position of its own"));
        }
    }
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
    /// The rows with invalid parameters. Their values in the columns have no meaning.
    pub(crate) errors: RowErrors,
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
        let mut errors = RowErrors::default();
        let mut float = |object: Argument<'_, '_>, name, default| {
            object.map_or(Ok(Column::Same(default)), |object| floats(object, name, (rows, &mut errors)))
        };
        let (temperature, top_p) = (float(temperature, "temperature", 1.0)?, float(top_p, "top_p", 1.0)?);
        let min_p = float(min_p, "min_p", 0.0)?;
        let seed = seeds(seed, (rows, &mut errors))?;
        let position = positions(position, (rows, &mut errors))?;
        let top_k = match top_k {
            Some(object) => integers(object, "top_k", (rows, &mut errors), (-1, "-1 to 2^31 - 1"))?,
            None => Column::Same(0),
        };
        let mask = mask.map(|mask| Mask::read(mask, rows, vocab_size)).transpose()?;
        if let Column::Same(_) = seed {
            let has_noise = |&row: &usize| temperature.get(row) != 0.0 && !errors.has(row);
            let places: Vec<_> = (0..rows).filter(has_noise).map(|row| (row, position.get(row), 0)).collect();
            refuse_equal_noise(places, &mut errors);
        }
        Ok(Columns { rows, seed, position, temperature, top_k, top_p, min_p, mask, errors })
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

/// Reads the argument `histories`.
fn snapshots(histories: &Bound<'_, PyAny>) -> PyResult<Vec<Arc<Tokens>>> {
    let list: Vec<Bound<'_, History>> =
        histories.extract().map_err(|_| invalid_type("histories must be a list with one History for each row"))?;
    Ok(list.iter().map(|history| history.get().snapshot()).collect())
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
        let mask = Tensor::borrow(&in_host_memory(mask, "mask")?, "mask")?;
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

    /// Forbids the tokens of a row that the bitmap `allowed` forbids.
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
    /// The rows with invalid parameters. Their other parameters have no meaning.
    pub(crate) errors: RowErrors,
}

impl Requests {
    /// Reads the arguments of a call with `rows` rows; `arguments` are histories, seed, position, first_draw and mask.
    pub(crate) fn read(
        rows: usize,
        vocab_size: u32,
        params: &Bound<'_, PyAny>,
        arguments: [Argument<'_, '_>; 5],
    ) -> PyResult<Requests> {
        let [histories, seed, position, first_draw, mask] = arguments;
        let mut errors = RowErrors::default();
        let count = |knob, len| match len == rows {
            true => Ok(()),
            false => Err(invalid(knob, format!("{knob} has {len} values for {rows} rows"))),
        };
        let one = params.cast::<SamplingParams>().ok();
        let list = match one {
            Some(params) => vec![params.clone(); rows],
            None => params
                .extract::<Vec<Bound<'_, SamplingParams>>>()
                .map_err(|_| invalid_type("params must be a SamplingParams, or a list with one for each row"))?,
        };
        count("params", list.len())?;
        let check = |(row, params): (usize, &Bound<'_, SamplingParams>)| {
            params.get().for_vocab(vocab_size).unwrap_or_else(|error| {
                errors.add(row, error.field, error.to_string());
                let valid = SamplingParamsBuilder::default().build(vocab_size);
                Arc::new(valid.expect("defaults are valid"))
            })
        };
        let params: Vec<Arc<Checked>> = list.iter().enumerate().map(check).collect();
        let histories: Option<Vec<Arc<Tokens>>> = histories.map(snapshots).transpose()?;
        histories.iter().try_for_each(|histories| count("histories", histories.len()))?;
        let given = seed.map(|seed| seeds(seed, (rows, &mut errors))).transpose()?;
        let of_row = |(row, params): (usize, &Bound<'_, SamplingParams>)| {
            let (own, given) = (params.get().seed(), given.as_ref().map(|given| given.get(row)));
            let fault = match (own, given) {
                (None, None) => "neither the row's SamplingParams nor the argument seed has a seed",
                (Some(_), Some(_)) => "the row's SamplingParams has a seed, so the argument seed must be None",
                _ => return own.or(given).unwrap_or_default(),
            };
            errors.add(row, "seed", fault.into());
            0
        };
        let seeds: Vec<u64> = list.iter().enumerate().map(of_row).collect();
        let positions = match (position, &histories) {
            (Some(position), _) => positions(position, (rows, &mut errors))?,
            (None, Some(list)) => Column::Each(list.iter().map(|tokens| tokens.tokens().len() as u64).collect()),
            (None, None) => {
                let text = "position must be given, or histories: their lengths are the default positions";
                return Err(invalid("position", text));
            }
        };
        let first_draws = match first_draw {
            Some(object) => integers(object, "first_draw", (rows, &mut errors), (0, "0 to 2^32 - 1"))?,
            None => Column::Same(0),
        };
        if matches!(given, Some(Column::Same(_))) || one.is_some_and(|params| params.get().seed().is_some()) {
            let has_noise = |&row: &usize| params[row].fields().temperature != 0.0 && !errors.has(row);
            let places = (0..rows).filter(has_noise).map(|row| (row, positions.get(row), first_draws.get(row)));
            refuse_equal_noise(places.collect(), &mut errors);
        }
        let mut mask = mask.map(|mask| Mask::read(mask, rows, vocab_size)).transpose()?;
        let mut requests = Requests { params, seeds, positions, first_draws, mask: None, histories, errors };
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
