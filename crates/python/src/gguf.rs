//! The head of a GGUF file.

use crate::error::invalid;
use crate::head::{Floats, HeadParts};
use crate::tensor::{Layout, Tensor};
use flash_sampling::Matrix;
use flash_sampling_models::gguf::{Gguf, GgufError, GgufHead, HEAD_BIAS, Scale};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Maps a GGUF file, and reads its head. The weight is the tensor `name`; by default, the weight of the model's head.
///
/// # Errors
/// `OSError` if the file cannot be mapped; `FlashSamplingError` if the file has no valid head.
pub(crate) fn head(path: &Path, name: Option<&str>) -> PyResult<HeadParts> {
    let map = map(path).map_err(|error| match error.raw_os_error() {
        Some(code) => PyOSError::new_err((code, error.to_string(), path.display().to_string())),
        None => Error::new(error.kind(), format!("{}: {error}", path.display())).into(),
    })?;
    let refused = |knob, error: &dyn core::fmt::Display| invalid(knob, format!("{}: {error}", path.display()));
    let in_file = |error: GgufError| refused("path", &format!("not a usable GGUF file: {error}"));
    let file = Gguf::parse(map.bytes()).map_err(in_file)?;
    let found = name.map_or_else(|| file.head_name(), Ok).and_then(|name| Ok((name, file.tensor(name)?)));
    let (name, weight) = found.map_err(|error| match error {
        GgufError::MissingTensor(_) => refused("tensor", &format!("{error}; it has {}", listing(&file))),
        error => refused("tensor", &error),
    })?;
    let [rows, cols] = weight.shape[..] else {
        let text = format!("{name} has shape {:?}, but must be [vocab, hidden]", weight.shape);
        return Err(refused("tensor", &text));
    };
    let GgufHead { vocab_size, soft_cap, scale } = file.head().map_err(in_file)?;
    let scale = match scale {
        None => 1.0,
        Some(Scale::Factor(factor)) => factor,
        Some(Scale::Unclear) => {
            return Err(refused("path", &"the meaning of logit_scale in this architecture is unknown"));
        }
    };
    // Only the weight of the model's head has a bias.
    let bias = match file.has(HEAD_BIAS) && file.head_name().is_ok_and(|head| head == name) {
        false => None,
        true => {
            let bias = file.tensor(HEAD_BIAS).map_err(in_file)?;
            if bias.shape != [rows] || !bias.dtype.is_float() {
                let found = format!("shape {:?} and type {}", bias.shape, bias.dtype.name());
                let text = format!("{HEAD_BIAS} has {found}, but must have shape [{rows}] and a float type");
                return Err(refused("path", &text));
            }
            let mut values = vec![0.0; rows];
            let matrix = Matrix::from_bytes(file.bytes(&bias), bias.dtype, 1, rows, rows);
            matrix.map_err(|error| refused("path", &error))?.row_to_f32(0, &mut values);
            Some(Floats::Host(values))
        }
    };
    let layout = Layout { dtype: weight.dtype, rows, cols, row_stride: cols };
    let vocab_size = vocab_size.map_or(rows, |size| size.min(rows));
    let weight = map.part(weight.range);
    let parts = HeadParts { weight, layout, scales: None, bias, soft_cap, scale, vocab_size, first_token: 0 };
    parts.head().map_err(|error| refused("path", &error))?;
    Ok(parts)
}

fn map(path: &Path) -> std::io::Result<Tensor> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    Tensor::map(&file)
}

/// The number of tensors and the first names, for an error message.
fn listing(file: &Gguf<'_>) -> String {
    let names: Vec<_> = file.names().take(4).collect();
    match file.names().count() {
        count @ ..=4 => format!("{count}: {}", names.join(", ")),
        count => format!("{count}: {}, ...", names[..3].join(", ")),
    }
}
