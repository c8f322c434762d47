//! Tensors that are borrowed from Python objects.
#![allow(unsafe_code)]

use crate::error::invalid;
use core::ops::Range;
use flash_sampling::{DType, Matrix, bf16, f16};
use memmap2::Mmap;
use pyo3::prelude::*;
use std::fs::File;
use std::sync::Arc;

/// The memory that holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// A GPU by its number.
    Cuda(i32),
}

impl core::fmt::Display for Place {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Place::Host => f.write_str("the CPU"),
            Place::Cuda(id) => write!(f, "cuda:{id}"),
        }
    }
}

/// The kind of an element type. The kind and the size of an element define the type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Bool,
    Int,
    UInt,
    Float,
    BFloat,
    /// float8_e4m3fn.
    Float8,
}

/// An element of a tensor, or a Python number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    Integer(i128),
    Float(f64),
}

/// A tensor that is borrowed from a Python object, which lives as long as the tensor.
///
/// Invariant: `data`, `kind`, `size`, `shape` and `strides` describe memory that `owner` keeps. By the package's
/// documentation, nothing else writes to the memory during a call.
pub(crate) struct Tensor {
    pub(crate) data: *const u8,
    pub(crate) place: Place,
    pub(crate) kind: Kind,
    /// Bytes of an element: 1 for `Bool` and `Float8`; 2 for `BFloat`; 2, 4 or 8 for `Float`; 1, 2, 4 or 8 for
    /// integers.
    pub(crate) size: usize,
    pub(crate) shape: Vec<usize>,
    /// In elements.
    pub(crate) strides: Vec<isize>,
    pub(crate) is_read_only: bool,
    /// For a tensor on a GPU: the current stream of the tensor's library. Later work on this stream runs after all
    /// earlier work on the tensor.
    pub(crate) stream: u64,
    pub(crate) owner: Arc<dyn Send + Sync>,
}

// SAFETY: the invariant; a tensor only reads the memory.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    pub(crate) fn address(&self) -> u64 {
        self.data as u64
    }

    /// The name of the element type.
    pub(crate) fn type_name(&self) -> String {
        match self.kind {
            Kind::Float8 => "float8_e4m3fn".into(),
            kind => format!("{kind:?}{}", 8 * self.size).to_lowercase(),
        }
    }

    /// The element type of floats. numpy has no bf16, so 16-bit unsigned integers are read as the bits of bf16.
    fn float_dtype(&self, what: &'static str, others: &str) -> PyResult<DType> {
        match (self.kind, self.size) {
            (Kind::BFloat | Kind::UInt, 2) => Ok(DType::BF16),
            (Kind::Float, 2) => Ok(DType::F16),
            (Kind::Float, 4) => Ok(DType::F32),
            _ => {
                let types = format!("bfloat16 (also as the bits in uint16), float16{others}");
                Err(invalid(what, format!("{what} has elements of {}, but must have {types}", self.type_name())))
            }
        }
    }

    /// The layout of a matrix of floats `[rows, cols]`.
    ///
    /// # Errors
    /// A number of dimensions other than two, an element type that is not supported, or rows that are not contiguous or
    /// that overlap.
    pub(crate) fn layout(&self, what: &'static str) -> PyResult<Layout> {
        self.layout_of(self.float_dtype(what, " or float32")?, what)
    }

    /// The layout of a weight `[vocab, hidden]`, which may have elements of 8 bits.
    ///
    /// # Errors
    /// The errors of [`Tensor::layout`].
    pub(crate) fn weight_layout(&self, what: &'static str) -> PyResult<Layout> {
        let dtype = match (self.kind, self.size) {
            (Kind::Int, 1) => DType::I8,
            (Kind::Float8, _) => DType::F8_E4M3,
            _ => self.float_dtype(what, ", float32, float8_e4m3fn or int8")?,
        };
        self.layout_of(dtype, what)
    }

    fn layout_of(&self, dtype: DType, what: &'static str) -> PyResult<Layout> {
        let [rows, cols] = self.shape[..] else {
            return Err(invalid(what, format!("{what} has shape {:?}, but must have two dimensions", self.shape)));
        };
        let row_stride = if rows < 2 { cols as isize } else { self.strides[0] };
        if (self.strides[1] != 1 && cols > 1) || row_stride < cols as isize {
            let strides = &self.strides;
            let text = format!(
                "{what} of shape {:?} has strides {strides:?}, but the elements of a row must follow each other, and \
                 rows must not overlap: make it contiguous first",
                self.shape
            );
            return Err(invalid(what, text));
        }
        Ok(Layout { dtype, rows, cols, row_stride: row_stride as usize })
    }

    /// The tensor as a matrix in host memory.
    ///
    /// # Errors
    /// The errors of [`Tensor::layout`], and a tensor on a GPU.
    pub(crate) fn matrix(&self, what: &'static str) -> PyResult<Matrix<'_>> {
        let layout = self.layout(what)?;
        self.check_host(what)?;
        let Layout { dtype, rows, cols, row_stride } = layout;
        let matrix = Matrix::from_bytes(self.bytes(), dtype, rows, cols, row_stride);
        matrix.map_err(|error| invalid(what, error.to_string()))
    }

    fn check_host(&self, what: &str) -> PyResult<()> {
        if self.place == Place::Host {
            return Ok(());
        }
        Err(invalid(what, format!("{what} is on {}, but must be on the CPU", self.place)))
    }

    /// The bytes from the start of the first element to the end of the last element.
    ///
    /// # Panics
    /// If the memory is a GPU's, or a stride is negative.
    pub(crate) fn bytes(&self) -> &[u8] {
        assert_eq!(self.place, Place::Host);
        if self.shape.contains(&0) || self.data.is_null() {
            return &[];
        }
        let dimensions = self.shape.iter().zip(&self.strides).filter(|(len, _)| **len > 1);
        let steps = dimensions.map(|(&len, &stride)| {
            assert!(stride >= 0, "a negative stride");
            (len as isize - 1) * stride
        });
        let last: isize = steps.sum();
        // SAFETY: the invariant, in host memory. The strides are not negative, so the first element has the lowest
        // address, and the last element the highest.
        unsafe { core::slice::from_raw_parts(self.data, (last as usize + 1) * self.size) }
    }

    /// Whether the elements follow each other in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut step = 1;
        // The stride of a dimension with one element does not matter.
        self.shape.iter().zip(&self.strides).rev().all(|(&len, &stride)| {
            let is_next = len < 2 || stride == step;
            step *= len as isize;
            is_next
        })
    }

    /// Whether the elements are contiguous values of float32.
    pub(crate) fn is_floats(&self) -> bool {
        (self.kind, self.size) == (Kind::Float, 4) && self.is_contiguous()
    }

    /// The values of a contiguous tensor of floats in host memory, of any shape.
    ///
    /// # Errors
    /// An element type that is not supported, a tensor that is not contiguous, or a tensor on a GPU.
    pub(crate) fn floats(&self, what: &'static str) -> PyResult<Vec<f32>> {
        let dtype = self.float_dtype(what, " or float32")?;
        self.check_host(what)?;
        if !self.is_contiguous() {
            let (shape, strides) = (&self.shape, &self.strides);
            return Err(invalid(
                what,
                format!("{what} of shape {shape:?} has strides {strides:?}: make it contiguous"),
            ));
        }
        let mut values = vec![0.0; self.shape.iter().product()];
        let matrix = Matrix::from_bytes(self.bytes(), dtype, 1, values.len(), values.len());
        matrix.map_err(|error| invalid(what, error.to_string()))?.row_to_f32(0, &mut values);
        Ok(values)
    }

    /// Maps a file into memory: a tensor `[bytes]` of uint8.
    ///
    /// # Errors
    /// The errors of the system.
    pub(crate) fn map(file: &File) -> std::io::Result<Tensor> {
        // SAFETY: the map is read-only and private to this process, and every bit pattern is a valid byte. If another
        // process truncates the file, a signal ends this process; if it rewrites the file, the bytes change.
        let map = unsafe { Mmap::map(file) }?;
        let (kind, shape, strides) = (Kind::UInt, vec![map.len()], vec![1]);
        let (data, place, owner) = (map.as_ptr(), Place::Host, Arc::new(map));
        Ok(Tensor { data, place, kind, size: 1, shape, strides, is_read_only: true, stream: 0, owner })
    }

    /// The part `range` of a tensor `[bytes]`.
    ///
    /// # Panics
    /// If the tensor has another shape or type, or the range exceeds it.
    pub(crate) fn part(self, range: Range<usize>) -> Tensor {
        assert!(self.size == 1 && self.strides == [1] && range.start <= range.end && range.end <= self.shape[0]);
        Tensor { data: self.data.wrapping_add(range.start), shape: vec![range.len()], ..self }
    }

    /// A range of rows of a matrix.
    ///
    /// # Panics
    /// If the tensor has no dimensions, or the range exceeds its rows.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Tensor {
        assert!(rows.start <= rows.end && rows.end <= self.shape[0]);
        let offset = rows.start as isize * self.strides[0] * self.size as isize;
        let (data, mut shape) = (self.data.wrapping_offset(offset), self.shape.clone());
        shape[0] = rows.len();
        let &Tensor { place, kind, size, is_read_only, stream, .. } = self;
        let (strides, owner) = (self.strides.clone(), self.owner.clone());
        Tensor { data, place, kind, size, shape, strides, is_read_only, stream, owner }
    }

    /// The numbers of a tensor in host memory with one dimension, or of a scalar tensor.
    pub(crate) fn numbers(&self, what: &str) -> PyResult<Vec<Number>> {
        let (len, stride) = match (&self.shape[..], &self.strides[..]) {
            ([], _) => (1, 0),
            ([len], [stride]) => (*len, *stride),
            _ => return Err(invalid(what, format!("{what} has shape {:?}, but must have one dimension", self.shape))),
        };
        self.check_host(what)?;
        if self.kind == Kind::Float8 {
            return Err(invalid(what, format!("{what} has elements of float8_e4m3fn, which only a weight may have")));
        }
        // SAFETY: the offsets of elements, in host memory.
        Ok((0..len as isize).map(|i| unsafe { self.number(i * stride) }).collect())
    }

    /// The number at an offset in elements.
    ///
    /// # Safety
    /// * The offset is that of an element of the tensor.
    /// * The memory is the host's.
    unsafe fn number(&self, offset: isize) -> Number {
        /// The value at an address of any alignment.
        ///
        /// # Safety
        /// The address is that of a value of this type.
        unsafe fn at<T: Copy>(address: *const u8) -> T {
            // SAFETY: the contract.
            unsafe { address.cast::<T>().read_unaligned() }
        }
        let address = self.data.wrapping_offset(offset * self.size as isize);
        // SAFETY: by the contract and the invariant, an element of this kind and size is at the address.
        unsafe {
            match (self.kind, self.size) {
                (Kind::Float, 2) => Number::Float(at::<f16>(address).to_f64()),
                (Kind::Float, 4) => Number::Float(at::<f32>(address).into()),
                (Kind::Float, _) => Number::Float(at(address)),
                (Kind::BFloat, _) => Number::Float(at::<bf16>(address).to_f64()),
                (Kind::Int, 1) => Number::Integer(at::<i8>(address).into()),
                (Kind::Int, 2) => Number::Integer(at::<i16>(address).into()),
                (Kind::Int, 4) => Number::Integer(at::<i32>(address).into()),
                (Kind::Int, _) => Number::Integer(at::<i64>(address).into()),
                (Kind::UInt | Kind::Bool, 1) => Number::Integer(at::<u8>(address).into()),
                (Kind::UInt, 2) => Number::Integer(at::<u16>(address).into()),
                (Kind::UInt, 4) => Number::Integer(at::<u32>(address).into()),
                (Kind::UInt | Kind::Bool, _) => Number::Integer(at::<u64>(address).into()),
                (Kind::Float8, _) => unreachable!("`numbers` refuses the type"),
            }
        }
    }

    /// Reads a bitmap `[rows, words]` or `[words]` of int32 or uint32. Returns the number of words of a row, and the
    /// words of all rows; a bitmap `[words]` is one row.
    pub(crate) fn bitmap(&self, what: &'static str) -> PyResult<(usize, Vec<u32>)> {
        let (rows, words) = match self.shape[..] {
            [words] => (1, words),
            [rows, words] => (rows, words),
            _ => return Err(invalid(what, format!("{what} has shape {:?}, but must be [rows, words]", self.shape))),
        };
        if !matches!((self.kind, self.size), (Kind::Int | Kind::UInt, 4)) {
            return Err(invalid(what, format!("{what} must have words of int32 or uint32, 32 tokens each")));
        }
        self.check_host(what)?;
        let step = *self.strides.last().unwrap_or(&1);
        let row_step = if self.shape.len() == 2 { self.strides[0] } else { 0 };
        let mut bitmap = Vec::with_capacity(rows * words);
        for row in 0..rows as isize {
            let word = |i: isize| self.data.wrapping_offset(4 * (row * row_step + i * step)).cast::<u32>();
            // SAFETY: the invariant, in host memory; words of the tensor's shape.
            bitmap.extend((0..words as isize).map(|i| unsafe { word(i).read_unaligned() }));
        }
        Ok((words, bitmap))
    }
}

/// The layout of a matrix: element type, rows, columns, elements from one row to the next.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
}
